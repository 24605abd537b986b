// XLA FFI handlers of the CPU kernels.
//
// The heavy kernels share their work out among this process's helpers and not over XLA's thread pool: its threads sleep
// between two kernels of a decode step, and wake too late to be of use in one.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ffi/cpu/kernels.h"
#include "ffi/handlers.h"
#include "ffi/helpers.h"

namespace ddtree {
namespace {

// Below this many multiply-adds a second thread costs more than it saves.
constexpr double kWorthAThread = 1e5;
// Tasks a thread: a thread that comes late, or not at all, leaves no more than this share of its work to wait for.
constexpr int64_t kTasksAThread = 4;

// Runs the kernel in as many tasks as the work is worth.
template <typename Args>
ffi::Error Spread(const Args& args, int (*kernel)(const Args*, int64_t, int64_t), double work, int64_t items,
                  int64_t tasks_a_thread = kTasksAThread) {
  const int64_t most = std::min<int64_t>({Processors(), items, static_cast<int64_t>(work / kWorthAThread)});
  const int64_t threads = std::max<int64_t>(1, most);
  const int64_t tasks = threads == 1 ? 1 : std::min(items, threads * tasks_a_thread);
  std::atomic<int> status{DDTREE_OK};
  Share(threads, tasks, [&](int64_t task) {
    if (const int own = kernel(&args, task, tasks); own != DDTREE_OK) status = own;
  });
  return Status(status);
}

ffi::Error DraftTopk(Any logits, Out log_probs, Out token_ids) {
  ddtree_draft_topk_args args{};
  if (ffi::Error error = DraftTopkArgs(logits, log_probs, token_ids, &args); error.failure()) return error;
  // An exponential and the filter take as long as some forty multiply-adds.
  return Spread(args, ddtree_draft_topk_cpu, 40.0 * args.rows * args.vocab, args.rows);
}

ffi::Error TreeBuild(Any log_probs, Any token_ids, Any root_tokens, Any budgets, Out tokens, Out parents, Out depths,
                     Out next_token, Out next_sibling, Out ancestors, Out out_log_probs, Out num_nodes,
                     bool keep_spine) {
  ddtree_tree_build_args args{};
  ffi::Error error = TreeBuildArgs(log_probs, token_ids, root_tokens, budgets, tokens, parents, depths, next_token,
                                   next_sibling, ancestors, out_log_probs, num_nodes, keep_spine, &args);
  return error.failure() ? error : Status(ddtree_tree_build_cpu(&args, 0, 1));
}

ffi::Error VerifyAttn(Any query, Any cache, Any ancestors, Any lengths, Any num_nodes, Any layer, Any cache_scale,
                      Out out, float scale, int32_t path) {
  ddtree_verify_attn_args args{};
  ffi::Error error =
      VerifyAttnArgs(query, cache, ancestors, lengths, num_nodes, layer, cache_scale, out, scale, path, &args);
  if (error.failure()) return error;
  double keys = 0;
  for (int64_t b = 0; b < args.batch; ++b) keys += std::clamp<int64_t>(args.lengths[b], 0, args.rows) + 8;
  const int64_t rows = args.nodes * args.heads, step = VerifyAttnRows(rows);
  return Spread(args, ddtree_verify_attn_cpu, 1088.0 * keys * rows, args.batch * ((rows + step - 1) / step));
}

ffi::Error AppendLatents(Any cache, Any latents, Any lengths, Any layer, Any cache_scale, Out out) {
  ddtree_append_latents_args args{};
  ffi::Error error = AppendLatentsArgs(cache, latents, lengths, layer, cache_scale, out, &args);
  return error.failure() ? error : Status(ddtree_append_latents_cpu(&args, 0, 1));
}

ffi::Error TreeAccept(Any tokens, Any next_token, Any next_sibling, Any num_nodes, Any target_tokens, Any stop_tokens,
                      Any max_new, Out nodes, Out out_tokens, Out num_emitted, Out finished) {
  ddtree_tree_accept_args args{};
  ffi::Error error = TreeAcceptArgs(tokens, next_token, next_sibling, num_nodes, target_tokens, stop_tokens, max_new,
                                    nodes, out_tokens, num_emitted, finished, &args);
  return error.failure() ? error : Status(ddtree_tree_accept_cpu(&args, 0, 1));
}

ffi::Error CommitPath(Any cache, Any nodes, Any num_emitted, Any lengths, Out out) {
  ddtree_commit_path_args args{};
  ffi::Error error = CommitPathArgs(cache, nodes, num_emitted, lengths, out, &args);
  return error.failure() ? error : Status(ddtree_commit_path_cpu(&args, 0, 1));
}

ffi::Error ExpertMlp(Any x, Any ids, Any weights, Any gate_up, Any gate_up_scale, Any down, Any down_scale, Out out,
                     Out partial) {
  ddtree_expert_mlp_args args{};
  ffi::Error error = ExpertMlpArgs(x, ids, weights, gate_up, gate_up_scale, down, down_scale, out, &args);
  if (error.failure()) return error;
  const int64_t pairs = args.tokens * args.top_k;
  Checker check("ddtree_expert_mlp");
  check.Shape("partial", *partial, {4 * pairs * args.hidden}).Dtype("partial", *partial, ffi::U8);
  if (!check.ok()) return check.error();
  args.partial = Data<float>(partial);
  error = Spread(args, ddtree_expert_mlp_cpu, 3.0 * pairs * args.hidden * args.inner, std::min(args.experts, pairs));
  return error.failure() ? error : Status(ddtree_expert_mlp_sum_cpu(&args));
}

ffi::Error FewRowsDot(Any x, Any matrix, Out out) {
  Checker check("ddtree_few_rows_dot");
  if (!HasRank(x, 3) || !HasRank(matrix, 3)) return check.Require(false, "x must be [batch, rows, inputs]").error();
  const int64_t batch = x.dimensions()[0], rows = x.dimensions()[1], inputs = x.dimensions()[2];
  const int64_t outputs = matrix.dimensions()[2];
  const bool bfloat = matrix.element_type() == ffi::BF16;
  check.Dtype("x", x, ffi::F32)
      .Shape("matrix", matrix, {batch, inputs, outputs})
      .Require(bfloat || matrix.element_type() == ffi::F32, "matrix must be float32 or bfloat16")
      .Shape("out", *out, {batch, rows, outputs}).Dtype("out", *out, ffi::F32)
      .Require(batch > 0, "batch must be at least 1")
      .Require(outputs % 16 == 0, "outputs must be a multiple of 16")
      .Require(HasFewRows(), "this processor lacks AVX-512");
  if (!check.ok()) return check.error();
  if (rows * outputs == 0) return ffi::Error::Success();
  FewRowsArgs args{Data<float>(x), nullptr, nullptr, Data<float>(out), batch, rows, inputs, outputs, 0};
  // Reading a float32 of the matrix takes as long as some eight multiply-adds, and AMX does four at the cost of one.
  // Its tasks are few, since they are short and begin with a wait for the matrix.
  double number = std::max<int64_t>(rows, 8);
  int64_t tasks_a_thread = kTasksAThread;
  if (!bfloat) {
    args.matrix = Data<float>(matrix);
  } else {
    static std::atomic<uint64_t> calls{0};
    args.bfloat_matrix = Data<uint16_t>(matrix);
    args.amx = HasFewRowsAmx() ? calls.fetch_add(1, std::memory_order_relaxed) + 1 : 0;
    number = std::max(args.amx != 0 ? rows / 4.0 : rows, 4.0);
    if (args.amx != 0) tasks_a_thread = 2;
  }
  return Spread(args, FewRows, number * batch * inputs * outputs, FewRowsItems(args), tasks_a_thread);
}

ffi::Error DraftAttention(Any query, Any keys, Any values, Any near_keys, Any near_values, Any visible, Out out) {
  Checker check("ddtree_draft_attn");
  if (!HasRank(query, 4) || !HasRank(keys, 4)) return check.Require(false, "query and keys must be of rank 4").error();
  const int64_t batch = query.dimensions()[0], slots = query.dimensions()[1], heads = query.dimensions()[2];
  const int64_t dim = query.dimensions()[3], kv_heads = keys.dimensions()[1], context = keys.dimensions()[2];
  check.Dtype("query", query, ffi::F32)
      .Shape("keys", keys, {batch, kv_heads, context, dim}).Dtype("keys", keys, ffi::F32)
      .Shape("values", values, {batch, kv_heads, context, dim}).Dtype("values", values, ffi::F32)
      .Shape("near_keys", near_keys, {batch, slots, kv_heads, dim}).Dtype("near_keys", near_keys, ffi::F32)
      .Shape("near_values", near_values, {batch, slots, kv_heads, dim}).Dtype("near_values", near_values, ffi::F32)
      .Shape("visible", visible, {batch, slots, context + slots}).Dtype("visible", visible, ffi::PRED)
      .Shape("out", *out, {batch, slots, heads, dim}).Dtype("out", *out, ffi::F32)
      .Require(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of the keys' heads")
      .Require(dim <= kMostDim, "heads must be of at most 256 numbers");
  if (!check.ok()) return check.error();
  const DraftAttnArgs args{Data<float>(query),     Data<float>(keys),        Data<float>(values),
                           Data<float>(near_keys), Data<float>(near_values), Data<uint8_t>(visible),
                           Data<float>(out),       batch, slots, heads, kv_heads, context, dim};
  if (batch * slots * heads * dim == 0) return ffi::Error::Success();
  return Spread(args, DraftAttn, 2.0 * batch * slots * heads * (context + slots) * dim, DraftAttnItems(args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftTopkCpu, DraftTopk,
                              ffi::Ffi::Bind().Arg<Any>().Ret<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TreeBuildCpu, TreeBuild,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>()
                                  .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Attr<bool>("keep_spine"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(VerifyAttnCpu, VerifyAttn,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Attr<float>("scale")
                                  .Attr<int32_t>("path"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AppendLatentsCpu, AppendLatents,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TreeAcceptCpu, TreeAccept,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Arg<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CommitPathCpu, CommitPath,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ExpertMlpCpu, ExpertMlp,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(FewRowsDotCpu, FewRowsDot,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftAttnCpu, DraftAttention,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>());

}  // namespace ddtree
