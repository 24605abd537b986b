// Every kernel's handler, by the name that the C ABI has for the kernel: what both extensions register.
#ifndef DDTREE_FFI_HANDLERS_ALL_H_
#define DDTREE_FFI_HANDLERS_ALL_H_

#include "ffi/handlers/append_latents.h"
#include "ffi/handlers/commit_path.h"
#include "ffi/handlers/draft_topk.h"
#include "ffi/handlers/expert_mlp.h"
#include "ffi/handlers/tree_accept.h"
#include "ffi/handlers/tree_build.h"
#include "ffi/handlers/verify_attn.h"

#define DDTREE_HANDLERS(X)        \
  X(append_latents, AppendLatents) \
  X(commit_path, CommitPath)       \
  X(draft_topk, DraftTopk)         \
  X(expert_mlp, ExpertMlp)         \
  X(tree_accept, TreeAccept)       \
  X(tree_build, TreeBuild)         \
  X(verify_attn, VerifyAttn)

// The queries of the CUDA kernels' scratch.
#define DDTREE_WORKSPACES(X) \
  X(draft_topk)              \
  X(expert_mlp)              \
  X(tree_build)              \
  X(verify_attn)

#endif  // DDTREE_FFI_HANDLERS_ALL_H_
