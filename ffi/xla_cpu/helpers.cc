#include "ffi/xla_cpu/helpers.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <thread>

namespace ddtree {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kLookout{200};  // how long a helper looks out for work before it sleeps
constexpr int kLooks = 32;                          // looks between two turns for whoever else wants the processor
constexpr int64_t kMostTasks = 0xffff;
constexpr int64_t kMostThreads = 16;  // the caller wakes them one by one, some microseconds each

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Helpers {
 public:
  void Share(int64_t threads, int64_t tasks, void (*run)(const void*, int64_t), const void* context) {
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (threads < 2 || tasks < 2 || tasks > kMostTasks || !turn.try_lock()) {
      for (int64_t task = 0; task < tasks; ++task) run(context, task);
      return;
    }
    run_ = run, context_ = context;
    done_.store(0, std::memory_order_relaxed);
    job_.store(((job_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | static_cast<uint64_t>(tasks));
    Call(std::min(threads, tasks) - 1);
    while (Work()) continue;
    for (int look = 1; done_.load(std::memory_order_acquire) < tasks; ++look) {
      look % kLooks == 0 ? std::this_thread::yield() : Pause();
    }
  }

 private:
  // A job in one word, so that a task is taken of the very job that was seen: its number, tasks taken, tasks in all.
  static bool HasTask(uint64_t job) { return (job >> 16 & 0xffff) < (job & 0xffff); }

  // Does one task of the job, if one is left. Whoever has taken a task may read run_ and context_, since the job does
  // not end before it.
  bool Work() {
    uint64_t job = job_.load(std::memory_order_acquire);
    do {
      if (!HasTask(job)) return false;
    } while (!job_.compare_exchange_weak(job, job + (1 << 16), std::memory_order_acquire));
    run_(context_, static_cast<int64_t>(job >> 16 & 0xffff));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  // Wakes or starts helpers until `wanted` are awake.
  void Call(int64_t wanted) {
    const int64_t asleep = asleep_.load();
    if (started_ - asleep >= wanted) return;
    if (asleep > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }  // whoever saw no task before this one has gone to sleep
      for (int64_t i = std::min(wanted - (started_ - asleep), asleep); i > 0; --i) wake_.notify_one();
    }
    try {
      for (; started_ < wanted; ++started_) std::thread([this] { Help(); }).detach();
    } catch (...) {
      // As many as the system grants: a job that others may have begun must be ended.
    }
  }

  [[noreturn]] void Help() {
    for (;;) {
      Clock::time_point until = Clock::now() + kLookout;
      for (int look = 1;; ++look) {
        if (Work()) {
          while (Work()) continue;
          until = Clock::now() + kLookout;
        }
        Pause();
        if (look % kLooks != 0) continue;
        if (Clock::now() > until) break;
        std::this_thread::yield();
      }
      std::unique_lock<std::mutex> lock(sleep_);
      ++asleep_;
      wake_.wait(lock, [this] { return HasTask(job_.load()); });
      --asleep_;
    }
  }

  std::mutex turn_;      // of the caller whom the helpers serve
  int64_t started_ = 0;  // under turn_
  void (*run_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<int64_t> asleep_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never destroyed, since its threads end with the process; a forked child has none of them and starts anew.
std::atomic<Helpers*> helpers{nullptr};

Helpers& Own() {
  static const int forgets = pthread_atfork(nullptr, nullptr, [] { helpers.store(nullptr); });
  static_cast<void>(forgets);
  Helpers* own = helpers.load(std::memory_order_acquire);
  if (own == nullptr) {
    Helpers* fresh = new Helpers;
    if (helpers.compare_exchange_strong(own, fresh)) return *fresh;
    delete fresh;
  }
  return *own;
}

// The processors' time that a container may have, in processors rounded up; 0 where it is not limited.
int64_t Quota() {
  // cgroup v2: "max 100000" or "200000 100000"; v1 has the numbers in two files, the first -1 for no limit.
  double quota = 0, period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); !(v2 >> quota >> period)) {
    quota = period = 0;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? static_cast<int64_t>(std::ceil(quota / period)) : 0;
}

}  // namespace

int64_t Processors() {
  static const int64_t count = [] {
    int64_t processors = std::max<int64_t>(1, std::thread::hardware_concurrency());
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) processors = CPU_COUNT(&set);
#endif
    const char* most = std::getenv("DDTREE_CPU_THREADS");
    const int64_t wanted = most == nullptr ? 0 : std::strtoll(most, nullptr, 10);
    for (const int64_t limit : {kMostThreads, Quota(), wanted}) {
      if (limit > 0) processors = std::min(processors, limit);
    }
    return processors;
  }();
  return count;
}

void Share(int64_t threads, int64_t tasks, void (*run)(const void*, int64_t), const void* context) {
  Own().Share(threads, tasks, run, context);
}

}  // namespace ddtree
