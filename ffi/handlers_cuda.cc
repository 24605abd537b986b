// XLA FFI handlers of the CUDA kernels: launches on XLA's stream and nothing else, so that a run of them, or a loop
// around them, can be one CUDA graph.
#include <cuda_runtime_api.h>

#include "ffi/handlers.h"

namespace ddtree {
namespace {

// Gives `args` the scratch that the lowering added as the last result.
template <typename Args>
void SetWorkspace(Out& workspace, Args* args) {
  args->workspace = Data<void>(workspace);
  args->workspace_bytes = workspace->size_bytes();
}

ffi::Error DraftTopk(cudaStream_t stream, Any logits, Out log_probs, Out token_ids, Out workspace) {
  ddtree_draft_topk_args args{};
  if (ffi::Error error = DraftTopkArgs(logits, log_probs, token_ids, &args); error.failure()) return error;
  SetWorkspace(workspace, &args);
  return Status(ddtree_draft_topk_cuda(&args, stream));
}

ffi::Error TreeBuild(cudaStream_t stream, Any log_probs, Any token_ids, Any root_tokens, Any budgets, Out tokens,
                     Out parents, Out depths, Out next_token, Out next_sibling, Out ancestors, Out out_log_probs,
                     Out num_nodes, Out workspace, bool keep_spine) {
  ddtree_tree_build_args args{};
  ffi::Error error = TreeBuildArgs(log_probs, token_ids, root_tokens, budgets, tokens, parents, depths, next_token,
                                   next_sibling, ancestors, out_log_probs, num_nodes, keep_spine, &args);
  if (error.failure()) return error;
  SetWorkspace(workspace, &args);
  return Status(ddtree_tree_build_cuda(&args, stream));
}

ffi::Error VerifyAttn(cudaStream_t stream, Any query, Any cache, Any ancestors, Any lengths, Any num_nodes, Any layer,
                      Any cache_scale, Out out, Out workspace, float scale, int32_t path) {
  ddtree_verify_attn_args args{};
  ffi::Error error =
      VerifyAttnArgs(query, cache, ancestors, lengths, num_nodes, layer, cache_scale, out, scale, path, &args);
  if (error.failure()) return error;
  SetWorkspace(workspace, &args);
  return Status(ddtree_verify_attn_cuda(&args, stream));
}

ffi::Error AppendLatents(cudaStream_t stream, Any cache, Any latents, Any lengths, Any layer, Any cache_scale,
                         Out out) {
  ddtree_append_latents_args args{};
  ffi::Error error = AppendLatentsArgs(cache, latents, lengths, layer, cache_scale, out, &args);
  return error.failure() ? error : Status(ddtree_append_latents_cuda(&args, stream));
}

ffi::Error TreeAccept(cudaStream_t stream, Any tokens, Any next_token, Any next_sibling, Any num_nodes,
                      Any target_tokens, Any stop_tokens, Any max_new, Out nodes, Out out_tokens, Out num_emitted,
                      Out finished) {
  ddtree_tree_accept_args args{};
  ffi::Error error = TreeAcceptArgs(tokens, next_token, next_sibling, num_nodes, target_tokens, stop_tokens, max_new,
                                    nodes, out_tokens, num_emitted, finished, &args);
  return error.failure() ? error : Status(ddtree_tree_accept_cuda(&args, stream));
}

ffi::Error CommitPath(cudaStream_t stream, Any cache, Any nodes, Any num_emitted, Any lengths, Out out) {
  ddtree_commit_path_args args{};
  ffi::Error error = CommitPathArgs(cache, nodes, num_emitted, lengths, out, &args);
  return error.failure() ? error : Status(ddtree_commit_path_cuda(&args, stream));
}

ffi::Error ExpertMlp(cudaStream_t stream, Any x, Any ids, Any weights, Any gate_up, Any gate_up_scale, Any down,
                     Any down_scale, Out out, Out workspace) {
  ddtree_expert_mlp_args args{};
  ffi::Error error = ExpertMlpArgs(x, ids, weights, gate_up, gate_up_scale, down, down_scale, out, &args);
  if (error.failure()) return error;
  SetWorkspace(workspace, &args);
  return Status(ddtree_expert_mlp_cuda(&args, stream));
}

auto OnStream() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftTopkCuda, DraftTopk, OnStream().Arg<Any>().Ret<Any>().Ret<Any>().Ret<Any>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(TreeBuildCuda, TreeBuild,
                              OnStream().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>()
                                  .Ret<Any>().Ret<Any>().Attr<bool>("keep_spine"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(VerifyAttnCuda, VerifyAttn,
                              OnStream().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Arg<Any>().Ret<Any>().Ret<Any>().Attr<float>("scale")
                                  .Attr<int32_t>("path"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AppendLatentsCuda, AppendLatents,
                              OnStream().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(TreeAcceptCuda, TreeAccept,
                              OnStream().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CommitPathCuda, CommitPath,
                              OnStream().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ExpertMlpCuda, ExpertMlp,
                              OnStream().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>().Ret<Any>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ddtree
