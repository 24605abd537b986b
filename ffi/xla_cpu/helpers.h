// Threads that help the one which calls a CPU kernel.
//
// A decode step calls a kernel of some ten microseconds every few microseconds, and a thread that sleeps wakes too late
// to be of use in one. So a helper looks out for the next one a while before it sleeps.
#ifndef DDTREE_FFI_XLA_CPU_HELPERS_H_
#define DDTREE_FFI_XLA_CPU_HELPERS_H_

#include <cstdint>

namespace ddtree {

// Threads that this process may run at once: by its affinity and its container's quota, at most 16, and at most
// DDTREE_CPU_THREADS where that is set.
int64_t Processors();

// Runs run(context, i) for every i in 0 .. tasks - 1 on the calling thread and the helpers that are awake, of which it
// sees to threads - 1, and returns when all are done. Another caller who has the helpers leaves this one to its own; a
// forked child gets its own.
void Share(int64_t threads, int64_t tasks, void (*run)(const void* context, int64_t task), const void* context);

template <typename Function>
void Share(int64_t threads, int64_t tasks, const Function& function) {
  Share(threads, tasks, [](const void* f, int64_t task) { (*static_cast<const Function*>(f))(task); }, &function);
}

}  // namespace ddtree

#endif  // DDTREE_FFI_XLA_CPU_HELPERS_H_
