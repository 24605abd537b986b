// What a warp does together to find the requests that hold places of the order.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_FIND_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_FIND_H_

#include "ffi/cuda/verify_attn/plan/order.h"
#include "ffi/cuda/verify_attn/problem.h"

namespace ddtree {

// Sum and greatest of `value` over the lanes of a warp.
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(~0u, value); }

// Sum of `value` over the lanes up to this one.
__device__ __forceinline__ int prefix_sum(int value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

// The request that holds something, and what is before the request; `batch` if there is none.
struct Found {
  int request, before;
};

// Looks whether one of a warp's requests, `b` of this lane, holds `at`; the lane's own has [begin, end).
__device__ __forceinline__ void find_in_warp(int at, int b, int lane, int begin, int end, Found* found) {
  const unsigned here = __ballot_sync(~0u, begin <= at && at < end);
  if (here == 0) return;
  const int source = __ffs(here) - 1;
  *found = {.request = b - lane + source, .before = __shfl_sync(~0u, begin, source)};
}

// The requests that hold tiles `first` and `second` of all tiles. `steps` becomes those of the tiles before `second`.
__device__ __forceinline__ void find_tiles(const Problem& p, int first, int second, int lane, Found* first_found,
                                           Found* second_found, int* steps) {
  *first_found = *second_found = {.request = p.batch, .before = 0};
  int sum = 0, own_steps = 0;
#pragma unroll 1
  for (int b = lane; b - lane < p.batch; b += 32) {
    const Request r = b < p.batch ? request_of(p, b) : Request{};
    const int end = sum + prefix_sum(r.tiles, lane), begin = end - r.tiles;
    find_in_warp(first, b, lane, begin, end, first_found);
    find_in_warp(second, b, lane, begin, end, second_found);
    own_steps += min(max(second - begin, 0), r.tiles) * r.steps;
    sum = __shfl_sync(~0u, end, 31);
  }
  *steps = warp_sum(own_steps);
}

// The requests that hold places `first` and `second` of the order.
__device__ __forceinline__ void find_places(const Problem& p, const Plan& plan, int first, int second, int lane,
                                            Found* first_found, Found* second_found) {
  *first_found = *second_found = {.request = p.batch, .before = 0};
  int sum = 0;
#pragma unroll 1
  for (int b = lane; b - lane < p.batch; b += 32) {
    const int places = b < p.batch ? places_of(plan, rest_of(p, plan, b)) : 0;
    const int end = sum + prefix_sum(places, lane), begin = end - places;
    find_in_warp(first, b, lane, begin, end, first_found);
    find_in_warp(second, b, lane, begin, end, second_found);
    sum = __shfl_sync(~0u, end, 31);
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_FIND_H_
