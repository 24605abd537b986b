// What verify_attn's kernels for Hopper share of going through a block's segments.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_SEGMENTS_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_SEGMENTS_H_

#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"

// For other architectures the kernels are traps, and nothing calls what is theirs.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177
#endif

namespace ddtree {

// A greatest score is replaced when one exceeds it by this many powers of two. Until then weights may exceed 1, which
// costs no precision, and the output need not shrink.
constexpr float kSlack = 8;

constexpr int kAhead = 3;  // steps by which the L2 cache is asked before a load

// The first row of a tile of a request's queries.
__device__ __forceinline__ int query_row(const Problem& p, int request, int tile) {
  return request * p.nodes * p.heads + tile * kTileRows;
}

// Plans a segment, the one before the last having left its place; whether there is one. One thread calls it. `Shared`
// is a kernel's shared memory.
template <typename Shared>
__device__ __forceinline__ bool plan_segment(const Problem& p, Shared& s, uint32_t number) {
  Segment& next = s.segments[number % 2];
  next_segment(p, &s.run, &next);
  const bool any = next.request < p.batch;
  sm90::arrive(&s.planned[number % 2]);
  return any;
}

// Plans segments as there is room for them, by one thread beside those that load and compute.
template <typename Shared>
__device__ void plan_segments(const Problem& p, Shared& s) {
  for (uint32_t number = 1; plan_segment(p, s, number); ++number) {
    // Sleeps, not to take turns from those who compute.
    while (!sm90::passed(&s.finished, (number - 1) % 2)) __nanosleep(200);
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_SEGMENTS_H_
