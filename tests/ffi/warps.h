// Blocks of CUDA threads on the host, for device code that uses nothing but integers, shared memory and what warps
// do together. Each thread is a coroutine that stops where it must wait for others. Include it before device code, with
// empty files in place of CUDA's headers.
#ifndef DDTREE_TESTS_FFI_WARPS_H_
#define DDTREE_TESTS_FFI_WARPS_H_

#include <stdint.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline

// What the headers of device code name.
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float, float) { std::abort(); }
using cudaStream_t = void*;

using std::max;
using std::min;

namespace warps {

struct Index {
  unsigned x;
};

// What a warp's threads do together.
enum class Together { kNothing, kShuffle, kShuffleUp, kBallot, kSum, kGreatest, kLeast, kMeet };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended, at_block_barrier;
  Together together;
  int given, argument, result;
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline int current;
inline std::function<void()> body;

inline void Stop() { swapcontext(&threads[current].context, &scheduler); }

inline int Do(Together together, int given, int argument = 0) {
  Thread& me = threads[current];
  me.together = together, me.given = given, me.argument = argument;
  Stop();
  return me.result;
}

inline void Start() {
  body();
  threads[current].ended = true;
  Stop();
}

// All threads of a warp have come to the same place: gives them what they get there.
inline void Finish(Thread* warp) {
  const Together together = warp[0].together;
  int sum = 0, greatest = warp[0].given, least = warp[0].given;
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) {
    if (warp[i].together != together) {
      std::printf("lanes 0 and %d of a warp do different things together\n", i);
      std::exit(1);
    }
    sum += warp[i].given;
    greatest = max(greatest, warp[i].given);
    least = min(least, warp[i].given);
    ballot |= (warp[i].given != 0 ? 1u : 0u) << i;
  }
  for (int i = 0; i < 32; ++i) {
    Thread& lane = warp[i];
    const int above = lane.argument;
    lane.together = Together::kNothing;
    switch (together) {
      case Together::kShuffle: lane.result = warp[above & 31].given; break;
      case Together::kShuffleUp: lane.result = warp[i >= above ? i - above : i].given; break;
      case Together::kBallot: lane.result = static_cast<int>(ballot); break;
      case Together::kSum: lane.result = sum; break;
      case Together::kGreatest: lane.result = greatest; break;
      case Together::kLeast: lane.result = least; break;
      default: break;
    }
  }
}

}  // namespace warps

inline warps::Index threadIdx, blockIdx, gridDim;

namespace warps {

// Runs a block of `count` threads, a multiple of 32, until all have ended.
inline void RunBlock(int count, const std::function<void()>& run) {
  constexpr int kStack = 1 << 16;
  body = run;
  threads.resize(count);
  for (Thread& t : threads) {
    if (t.stack == nullptr) t.stack.reset(new char[kStack]);
    t.ended = t.at_block_barrier = false;
    t.together = Together::kNothing;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = kStack;
    t.context.uc_link = nullptr;
    makecontext(&t.context, Start, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (current = 0; current < count; ++current) {
      const Thread& t = threads[current];
      if (t.ended || t.at_block_barrier || t.together != Together::kNothing) continue;
      threadIdx.x = current;
      swapcontext(&scheduler, &threads[current].context);
      moved = true;
    }
    for (int first = 0; first < count; first += 32) {
      const auto waits = [](const Thread& t) { return !t.ended && t.together != Together::kNothing; };
      if (!std::all_of(&threads[first], &threads[first] + 32, waits)) continue;
      Finish(&threads[first]);
      moved = true;
    }
    const auto at_barrier = [](const Thread& t) { return t.ended || t.at_block_barrier; };
    if (moved || !std::all_of(threads.begin(), threads.end(), at_barrier)) continue;
    for (Thread& t : threads) {
      moved |= !t.ended;
      t.at_block_barrier = false;
    }
  }
  for (const Thread& t : threads) {
    if (t.ended) continue;
    std::printf("a block hangs\n");
    std::exit(1);
  }
}

}  // namespace warps

inline int __shfl_sync(unsigned, int x, int lane, int = 32) { return warps::Do(warps::Together::kShuffle, x, lane); }
inline int __shfl_up_sync(unsigned, int x, int by) { return warps::Do(warps::Together::kShuffleUp, x, by); }
inline unsigned __ballot_sync(unsigned, bool x) { return warps::Do(warps::Together::kBallot, x); }
inline bool __any_sync(unsigned, bool x) { return warps::Do(warps::Together::kBallot, x) != 0; }
inline int __reduce_add_sync(unsigned, int x) { return warps::Do(warps::Together::kSum, x); }
inline int __reduce_max_sync(unsigned, int x) { return warps::Do(warps::Together::kGreatest, x); }
inline int __reduce_min_sync(unsigned, int x) { return warps::Do(warps::Together::kLeast, x); }
inline void __syncwarp() { warps::Do(warps::Together::kMeet, 0); }
inline void __syncthreads() {
  warps::threads[warps::current].at_block_barrier = true;
  warps::Stop();
}
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> by % 32);
}

#endif  // DDTREE_TESTS_FFI_WARPS_H_
