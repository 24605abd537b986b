// A CPU kernel's work, shared out as far as it is worth it.
//
// Kernels share their work among this process's helpers and not over XLA's thread pool: its threads sleep between two
// kernels of a decode step, and wake too late to be of use in one.
#ifndef DDTREE_FFI_XLA_CPU_SPREAD_H_
#define DDTREE_FFI_XLA_CPU_SPREAD_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"
#include "ffi/xla_cpu/helpers.h"

namespace ddtree {

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

}  // namespace ddtree

#endif  // DDTREE_FFI_XLA_CPU_SPREAD_H_
