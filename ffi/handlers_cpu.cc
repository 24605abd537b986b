// XLA FFI handlers of the CPU kernels.
//
// The heavy kernels share their work out over XLA's thread pool and return a future; the pool is never waited for,
// since a handler may be running on it. Small work, and the other kernels, run where they are called.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "ffi/cpu/kernels.h"
#include "ffi/handlers.h"

namespace ddtree {
namespace {

// Below this many multiply-adds a second thread costs more than it saves.
constexpr double kWorthAThread = 4e5;
// Tasks a thread: a thread that wakes late, or not at all, leaves no more than this share of its work to wait for.
constexpr int64_t kTasksAThread = 4;

// Runs the kernel in as many tasks as the work is worth, and `finish` after the last of them. Threads take tasks as they
// come: waking one takes as long as some kernels, so whoever is there does the work, be it the calling thread alone.
template <typename Args>
ffi::Future Spread(ffi::ThreadPool& pool, const Args& args, int (*kernel)(const Args*, int64_t, int64_t), double work,
                   int64_t items, int (*finish)(const Args*) = nullptr) {
  const int64_t most = std::min<int64_t>({pool.num_threads(), items, static_cast<int64_t>(work / kWorthAThread)});
  const int64_t threads = std::max<int64_t>(1, most);
  const int64_t tasks = threads == 1 ? 1 : std::min(items, threads * kTasksAThread);
  ffi::CountDownPromise promise(tasks);
  ffi::Future future(promise);
  struct Counters {
    std::atomic<int64_t> next{0}, left;
  };
  auto counters = std::make_shared<Counters>();
  counters->left = tasks;
  auto run = [=]() mutable {
    // A thread that comes after the last task has been taken touches no buffer: they may be gone by then.
    for (int64_t task; (task = counters->next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      int status = kernel(&args, task, tasks);
      if (counters->left.fetch_sub(1, std::memory_order_acq_rel) == 1 && finish != nullptr && status == DDTREE_OK) {
        status = finish(&args);
      }
      promise.CountDown(1, Status(status));
    }
  };
  for (int64_t thread = 1; thread < threads; ++thread) pool.Schedule([run]() mutable { run(); });
  run();
  return future;
}

ffi::Future Failed(const ffi::Error& error) {
  ffi::CountDownPromise promise(1);
  ffi::Future future(promise);
  promise.CountDown(1, error);
  return future;
}

ffi::Future DraftTopk(ffi::ThreadPool pool, Any logits, Out log_probs, Out token_ids) {
  ddtree_draft_topk_args args{};
  if (ffi::Error error = DraftTopkArgs(logits, log_probs, token_ids, &args); error.failure()) return Failed(error);
  // An exponential and the filter take as long as some forty multiply-adds.
  return Spread(pool, args, ddtree_draft_topk_cpu, 40.0 * args.rows * args.vocab, args.rows);
}

ffi::Error TreeBuild(Any log_probs, Any token_ids, Any root_tokens, Any budgets, Out tokens, Out parents, Out depths,
                     Out next_token, Out next_sibling, Out ancestors, Out out_log_probs, Out num_nodes,
                     bool keep_spine) {
  ddtree_tree_build_args args{};
  ffi::Error error = TreeBuildArgs(log_probs, token_ids, root_tokens, budgets, tokens, parents, depths, next_token,
                                   next_sibling, ancestors, out_log_probs, num_nodes, keep_spine, &args);
  return error.failure() ? error : Status(ddtree_tree_build_cpu(&args, 0, 1));
}

ffi::Future VerifyAttn(ffi::ThreadPool pool, Any query, Any cache, Any ancestors, Any lengths, Any num_nodes, Any layer,
                       Any cache_scale, Out out, float scale, int32_t path) {
  ddtree_verify_attn_args args{};
  ffi::Error error =
      VerifyAttnArgs(query, cache, ancestors, lengths, num_nodes, layer, cache_scale, out, scale, path, &args);
  if (error.failure()) return Failed(error);
  double keys = 0;
  for (int64_t b = 0; b < args.batch; ++b) keys += std::clamp<int64_t>(args.lengths[b], 0, args.rows) + 8;
  const int64_t rows = args.nodes * args.heads, step = VerifyAttnRows(rows);
  return Spread(pool, args, ddtree_verify_attn_cpu, 1088.0 * keys * rows, args.batch * ((rows + step - 1) / step));
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

ffi::Future ExpertMlp(ffi::ThreadPool pool, Any x, Any ids, Any weights, Any gate_up, Any gate_up_scale, Any down,
                      Any down_scale, Out out, Out partial) {
  ddtree_expert_mlp_args args{};
  ffi::Error error = ExpertMlpArgs(x, ids, weights, gate_up, gate_up_scale, down, down_scale, out, &args);
  if (error.failure()) return Failed(error);
  const int64_t pairs = args.tokens * args.top_k;
  Checker check("ddtree_expert_mlp");
  check.Shape("partial", *partial, {4 * pairs * args.hidden}).Dtype("partial", *partial, ffi::U8);
  if (!check.ok()) return Failed(check.error());
  args.partial = Data<float>(partial);
  return Spread(pool, args, ddtree_expert_mlp_cpu, 3.0 * pairs * args.hidden * args.inner, std::min(args.experts, pairs),
                ddtree_expert_mlp_sum_cpu);
}

ffi::Future FewRowsDot(ffi::ThreadPool pool, Any x, Any matrix, Out out) {
  Checker check("ddtree_few_rows_dot");
  if (!HasRank(x, 2) || !HasRank(matrix, 2)) {
    return Failed(check.Require(false, "x must be [rows, inputs]").error());
  }
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = matrix.dimensions()[1];
  check.Dtype("x", x, ffi::F32)
      .Shape("matrix", matrix, {inputs, outputs}).Dtype("matrix", matrix, ffi::F32)
      .Shape("out", *out, {rows, outputs}).Dtype("out", *out, ffi::F32)
      .Require(outputs % 16 == 0, "outputs must be a multiple of 16")
      .Require(HasFewRows(), "this processor lacks AVX-512");
  if (!check.ok()) return Failed(check.error());
  const FewRowsArgs args{Data<float>(x), Data<float>(matrix), Data<float>(out), rows, inputs, outputs};
  return Spread(pool, args, FewRows, 1.0 * rows * inputs * outputs, FewRowsTiles(outputs));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftTopkCpu, DraftTopk,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Ret<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TreeBuildCpu, TreeBuild,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>()
                                  .Attr<bool>("keep_spine"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(VerifyAttnCpu, VerifyAttn,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
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
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(FewRowsDotCpu, FewRowsDot,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Ret<Any>());

}  // namespace ddtree
