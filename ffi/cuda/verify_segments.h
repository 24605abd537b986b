// What verify_attn's two bfloat16 kernels for Hopper share of going through a block's segments.
#ifndef DDTREE_FFI_CUDA_VERIFY_SEGMENTS_H_
#define DDTREE_FFI_CUDA_VERIFY_SEGMENTS_H_

#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_plan.h"

namespace ddtree {

// A greatest score is replaced when one exceeds it by this many powers of two. Until then weights may exceed 1, which
// costs no precision, and the output need not shrink.
constexpr float kSlack = 8;

// Plans the next segment, whenever the one before this has left its place. One thread calls it, beside those that load
// and compute; `Shared` is a kernel's shared memory.
template <typename Shared>
__device__ void plan_segments(const Problem& p, Shared& s) {
  for (uint32_t number = 0;; ++number) {
    // Sleeps, not to take turns from those who compute.
    while (number >= 1 && !sm90::passed(&s.finished, (number - 1) % 2)) __nanosleep(200);
    Segment& next = s.segments[(number + 1) % 2];
    next_segment(p, &s.run, &next);
    const bool last = next.request == p.batch;
    sm90::arrive(&s.planned[(number + 1) % 2]);
    if (last) return;
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_SEGMENTS_H_
