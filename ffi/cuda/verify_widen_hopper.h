// How the rows of an e4m3 cache come to the buffers of verify_attn's Hopper kernel.
//
// Shared memory has no room for bytes beside the two buffers of bfloat16 and the queries. So a warpgroup brings them to
// registers, half a tile at a time, and stores them widened when the half of a buffer is free. What memory takes to
// answer is hidden by asking the L2 cache for whole steps ahead. Nothing of it may be spilled: a load from local memory
// waits for the loads that are on their way.
#ifndef DDTREE_FFI_CUDA_VERIFY_WIDEN_HOPPER_H_
#define DDTREE_FFI_CUDA_VERIFY_WIDEN_HOPPER_H_

#include <cuda.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn.h"
#include "ffi/cuda/verify_plan.h"
#include "ffi/cuda/verify_segments.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace widening {

constexpr int kWarps = 4;
// A half of a tile is half of the latent numbers of its 64 rows, and all rotary numbers of half of its rows. Of every
// eight rows a warp takes two, 16 numbers a thread, and then the rotary numbers of eight: all that a thread stores has
// the same place in the swizzle.
constexpr int kRowsTogether = 2 * kWarps;
constexpr int kTimes = kHopperStep / kRowsTogether;
constexpr int kHalfNumbers = DDTREE_LATENT_DIM / 2;

// What a thread has of a half: 16 numbers of a row each.
using Half = uint4[kTimes + 1];

__device__ __forceinline__ int latent_row(int warp, int lane) { return warp * 2 + lane / 16; }
__device__ __forceinline__ int rotary_row(int half, int warp, int lane) {
  return half * (kHopperStep / 2) + warp * 8 + lane / 4;
}

// Asks for a half of the tile whose first row is at `rows`. Beyond row `last`, the request's last that there is room
// for, that one is read instead: nodes see neither.
__device__ __forceinline__ void ask(Half& numbers, const uint8_t* rows, int last, int half, int warp, int lane) {
  const auto load = [](const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); };
  const int row = latent_row(warp, lane);
  const uint8_t* from = rows + half * kHalfNumbers + lane % 16 * 16;
  if (last >= kHopperStep - 1) {
    from += row * DDTREE_ROW_DIM;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) numbers[i] = load(from + i * kRowsTogether * DDTREE_ROW_DIM);
  } else {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) numbers[i] = load(from + min(row + i * kRowsTogether, last) * DDTREE_ROW_DIM);
  }
  const uint8_t* rotary = rows + min(rotary_row(half, warp, lane), last) * DDTREE_ROW_DIM;
  numbers[kTimes] = load(rotary + DDTREE_LATENT_DIM + lane % 4 * 16);
}

// The two e4m3 numbers in the low half of `x` as bfloat16. All of e4m3 is in half, and all of that in float.
__device__ __forceinline__ uint32_t widen_pair(uint32_t x) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(x)));
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack(pair.x, pair.y);
}

__device__ __forceinline__ uint4 widen(uint32_t low, uint32_t high) {
  return make_uint4(widen_pair(low), widen_pair(low >> 16), widen_pair(high), widen_pair(high >> 16));
}

// Stores it in a buffer.
__device__ __forceinline__ void store(const Half& numbers, uint8_t* buffer, int half, int warp, int lane) {
  // Each thread has two chunks of a row. Of eight threads, which store at once, four begin with their second one: the
  // eight chunks would else lie in half of the banks.
  const bool swapped = lane / 4 % 2;
  const int chunk = lane % 4 * 2, row = latent_row(warp, lane), rotary = rotary_row(half, warp, lane);
  uint8_t* const to = buffer + (half * (kHalfNumbers / 64) + lane % 16 / 4) * sm90::kBoxBytes + row * 128;
  const int first = ((chunk + swapped) ^ row % 8) << 4;
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const uint4 x = numbers[i];
    uint8_t* const rows = to + i * kRowsTogether * 128;
    *reinterpret_cast<uint4*>(rows + first) = swapped ? widen(x.z, x.w) : widen(x.x, x.y);
    *reinterpret_cast<uint4*>(rows + (first ^ 16)) = swapped ? widen(x.x, x.y) : widen(x.z, x.w);
  }
  const uint4 x = numbers[kTimes];
  uint8_t* const rows = buffer + DDTREE_LATENT_DIM / 64 * sm90::kBoxBytes + rotary * 128;
  *reinterpret_cast<uint4*>(rows + ((chunk ^ rotary % 8) << 4)) = widen(x.x, x.y);
  *reinterpret_cast<uint4*>(rows + (((chunk + 1) ^ rotary % 8) << 4)) = widen(x.z, x.w);
}

// The first row of a step of a request.
__device__ __forceinline__ const uint8_t* first_row(const Problem& p, int request, int step) {
  const int64_t plane = layer_of(p.layer, p.layers) * p.batch + request;
  return static_cast<const uint8_t*>(p.cache) + (plane * p.rows + step * kHopperStep) * DDTREE_ROW_DIM;
}

// Asks the L2 cache for a step, of which there are `room` rows.
__device__ __forceinline__ void prefetch_step(const uint8_t* rows, int room) {
  sm90::prefetch_bytes(rows, min(room, kHopperStep) * DDTREE_ROW_DIM);
}

// What the warps do, of which this is `warp`, for all tiles of a block's run; `kAhead` is by how many steps the L2 cache
// is asked before a load. The first warp loads queries too. `Shared` is the kernel's shared memory.
template <int kAhead, typename Shared>
__device__ __forceinline__ void widen_tiles(const Problem& p, Shared& s, const CUtensorMap* query_map, int warp,
                                            int lane) {
  constexpr int kStepBytes = kHopperStep * DDTREE_ROW_DIM;
  uint32_t tile = 0;  // of the block's run
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    if (number >= 1) sm90::wait(&s.planned[number % 2], (number - 1) / 2 % 2);
    const Segment& segment = s.segments[number % 2];
    const int request = segment.request;
    if (request == p.batch) return;
    const uint8_t* rows = first_row(p, request, segment.step);
    int room = p.rows - segment.step * kHopperStep, left = segment.end_step - segment.step;
    Half numbers;
    ask(numbers, rows, room - 1, tile % 2, warp, lane);
    if (warp == 0 && lane == 0) {
#pragma unroll 1
      for (int i = 1; i < min(kAhead, left); ++i) prefetch_step(rows + i * kStepBytes, room - i * kHopperStep);
      sm90::wait(&s.query_empty, number % 2 ^ 1);
      sm90::arrive_expecting(&s.query_full, sizeof(s.query));
      sm90::load_box(s.query, query_map, &s.query_full, query_row(p, request, segment.tile), 0, 0);
    }
    __syncwarp();
#pragma unroll 1
    for (; left > 0; --left, ++tile) {
      if (warp == 0 && lane == 0 && left > kAhead) {
        prefetch_step(rows + kAhead * kStepBytes, room - kAhead * kHopperStep);
      }
      __syncwarp();
      const int buffer = tile % 2;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int half = i ^ buffer;
        // What the compiler kept from one half to the next would not fit in the registers.
        asm volatile("" : "+r"(warp), "+r"(lane));
        sm90::wait(&s.empty[buffer][half], tile / 2 % 2 ^ 1);
        store(numbers, s.keys[buffer], half, warp, lane);
        sm90::fence_writes();
        __syncwarp();
        if (lane == 0) sm90::arrive(&s.full[buffer][half]);
        // The next half is the tile's other one, or that with which the next tile begins. Not before the products may
        // begin: to ask takes its time too.
        if (i == 1) rows += kStepBytes, room -= kHopperStep;
        if (i == 0 || left > 1) ask(numbers, rows, room - 1, half ^ 1 ^ i, warp, lane);
      }
    }
  }
}

}  // namespace widening
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_WIDEN_HOPPER_H_
