// The CUDA entry points of a library that was built without CUDA: one header and one set of symbols for both builds.
#include "ffi/ddtree.h"

size_t ddtree_draft_topk_workspace(int64_t, int64_t, int64_t) { return 0; }
size_t ddtree_tree_build_workspace(int64_t, int64_t, int64_t, int64_t) { return 0; }
size_t ddtree_verify_attn_workspace(int64_t, int64_t, int64_t, int64_t, int32_t) { return 0; }

int ddtree_draft_topk_cuda(const ddtree_draft_topk_args*, void*) { return DDTREE_NO_CUDA; }
int ddtree_tree_build_cuda(const ddtree_tree_build_args*, void*) { return DDTREE_NO_CUDA; }
int ddtree_verify_attn_cuda(const ddtree_verify_attn_args*, void*) { return DDTREE_NO_CUDA; }
int ddtree_append_latents_cuda(const ddtree_append_latents_args*, void*) { return DDTREE_NO_CUDA; }
int ddtree_tree_accept_cuda(const ddtree_tree_accept_args*, void*) { return DDTREE_NO_CUDA; }
int ddtree_commit_path_cuda(const ddtree_commit_path_args*, void*) { return DDTREE_NO_CUDA; }
