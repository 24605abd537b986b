// Helper threads: every task runs once and before Share returns, whoever else calls, sleeps or forks.
#include "ffi/xla_cpu/helpers.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

// One job: its tasks leave their number, which nobody else may have done, in places that end with the call.
void Job(int64_t threads, int64_t tasks) {
  std::vector<std::atomic<int>> runs(tasks);
  std::vector<int64_t> squares(tasks, -1);
  ddtree::Share(threads, tasks, [&](int64_t task) {
    ++runs[task];
    squares[task] = task * task;
  });
  for (int64_t task = 0; task < tasks; ++task) {
    if (runs[task] != 1 || squares[task] != task * task) {
      std::fprintf(stderr, "task %ld of %ld on %ld threads: %d runs\n", static_cast<long>(task),
                   static_cast<long>(tasks), static_cast<long>(threads), runs[task].load());
      std::exit(1);
    }
  }
}

void Jobs(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    for (int64_t threads : {1, 2, 3, 8}) {
      for (int64_t tasks : {0, 1, 2, 7, 64}) Job(threads, tasks);
    }
  }
}

// Two tasks that wait for each other, which one thread alone would never end.
bool AnotherThreadHelps() {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::atomic<int> met{0};
  ddtree::Share(2, 2, [&](int64_t) {
    ++met;
    while (met < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  });
  return std::chrono::steady_clock::now() < limit;
}

}  // namespace

int main() {
  // Read once, at the first call: a limit above the processors that there are is none.
  setenv("DDTREE_CPU_THREADS", "1000000", 1);
  if (ddtree::Processors() < 1 || ddtree::Processors() > 16) return 1;
  if (!AnotherThreadHelps()) return 2;
  Jobs(500);
  Job(4, 100000);  // more than a job's word counts
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Jobs(1);  // the helpers were asleep
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(190 + i));
    Job(2, 8);  // or about to
  }

  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back([] { Jobs(200); });
  for (std::thread& caller : callers) caller.join();

  // A child has no helpers but those that it starts, whatever the parent's were doing.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) Jobs(1);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(1800);  // a limit against hanging alone
      Jobs(2);
      _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) return 1;
  }
  stop = true;
  busy.join();
  return 0;
}
