// How the rows of an e4m3 cache come to the buffers of verify_attn's Hopper kernels.
//
// The kernel of two warpgroups has no room in shared memory for bytes beside its buffers of bfloat16. So warps bring
// them to registers, a piece of a tile at a time, and store them widened when its place in a buffer is free. What
// memory takes to answer is hidden by asking the L2 cache for whole steps ahead. Nothing of it may be spilled: a load
// from local memory waits for the loads that are on their way.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_WIDEN_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_WIDEN_H_

#include <cuda.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace widening {

// The two e4m3 elements in the low half of `x` as bfloat16. All of e4m3 is in half, and all of that in float.
__device__ __forceinline__ uint32_t widen_pair(uint32_t x) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(x)));
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack(pair.x, pair.y);
}

__device__ __forceinline__ uint4 widen(uint32_t low, uint32_t high) {
  return make_uint4(widen_pair(low), widen_pair(low >> 16), widen_pair(high), widen_pair(high >> 16));
}

// What a thread has of a piece: 16 elements of each of some rows. Eight warps take a whole tile at a time; four take
// half of its latent elements, and the rotary elements of half of its rows. Either way they take eight rows together,
// so all that a thread stores has the same place in the swizzle, and then rotary elements of eight rows per warp.
template <int kWarps>
struct Piece {
  static constexpr int kTogether = 8;
  static constexpr int kTimes = kHopperStep / kTogether;
  static constexpr int kLanes = kWarps * 32 / kTogether;  // of a row
  static constexpr int kPieces = 32 / kLanes;             // of a tile
  uint4 elements[kTimes + 1];

  __device__ __forceinline__ static int latent_row(int warp, int lane) { return (warp * 32 + lane) / kLanes; }
  __device__ __forceinline__ static int rotary_row(int piece, int warp, int lane) {
    return piece * (kHopperStep / kPieces) + warp * 8 + lane / 4;
  }

  // Asks for piece `piece` of the tile whose first row is at `rows`. In place of rows beyond `last`, the request's last
  // that there is room for, that one is read again; nodes see none of those places.
  __device__ __forceinline__ void ask(const uint8_t* rows, int last, int piece, int warp, int lane) {
    const auto load = [](const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); };
    const int row = latent_row(warp, lane);
    const uint8_t* from = rows + (piece * kLanes + lane % kLanes) * 16;
    if (last >= kHopperStep - 1) {
      from += row * DDTREE_ROW_DIM;
#pragma unroll
      for (int i = 0; i < kTimes; ++i) elements[i] = load(from + i * kTogether * DDTREE_ROW_DIM);
    } else {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) elements[i] = load(from + min(row + i * kTogether, last) * DDTREE_ROW_DIM);
    }
    const uint8_t* rotary = rows + min(rotary_row(piece, warp, lane), last) * DDTREE_ROW_DIM;
    elements[kTimes] = load(rotary + DDTREE_LATENT_DIM + lane % 4 * 16);
  }

  // Stores it in the boxes of a buffer: those of latent elements, and the one of rotary elements.
  __device__ __forceinline__ void store(uint8_t* latents, uint8_t* rotary, int piece, int warp, int lane) const {
    // A thread has two chunks of a row. Of eight threads, which store at once, four begin with their second one: the
    // eight chunks would else lie in half of the banks.
    const bool swapped = lane / 4 % 2;
    const int chunk = lane % 4 * 2, row = latent_row(warp, lane), first = ((chunk + swapped) ^ row % 8) << 4;
    latents += (piece * kLanes + lane % kLanes) / 4 * sm90::kBoxBytes + row * 128;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const uint4 x = elements[i];
      uint8_t* const to = latents + i * kTogether * 128;
      // Chosen before they are widened, or that would be two ways to go.
      *reinterpret_cast<uint4*>(to + first) = widen(swapped ? x.z : x.x, swapped ? x.w : x.y);
      *reinterpret_cast<uint4*>(to + (first ^ 16)) = widen(swapped ? x.x : x.z, swapped ? x.y : x.w);
    }
    const uint4 x = elements[kTimes];
    const int own = rotary_row(piece, warp, lane);
    rotary += own * 128;
    *reinterpret_cast<uint4*>(rotary + ((chunk ^ own % 8) << 4)) = widen(x.x, x.y);
    *reinterpret_cast<uint4*>(rotary + (((chunk + 1) ^ own % 8) << 4)) = widen(x.z, x.w);
  }
};

// The first row of a step of a request.
__device__ __forceinline__ const uint8_t* first_row(const Problem& p, int request, int step) {
  const int64_t plane = layer_of(p.layer, p.layers) * p.batch + request;
  return static_cast<const uint8_t*>(p.cache) + (plane * p.rows + step * kHopperStep) * DDTREE_ROW_DIM;
}

// Asks the L2 cache for a step, of which there are `room` rows.
__device__ __forceinline__ void prefetch_step(const uint8_t* rows, int room) {
  if (room > 0) sm90::prefetch_bytes(rows, min(room, kHopperStep) * DDTREE_ROW_DIM);
}

// What each of kWarps warps does, of which this is `warp`, for all tiles of a block's run. `Shared` is the kernel's
// shared memory. One thread of the first warp calls load_query(number, segment). Every warp calls widen(tile, piece,
// which, warp, lane), which waits for room, stores the piece and tells of it; piece_of(tile, i) is which of a tile's
// pieces comes as number i.
template <int kWarps, typename Shared, typename LoadQuery, typename PieceOf, typename Widen>
__device__ __forceinline__ void widen_tiles(const Problem& p, Shared& s, int warp, int lane,
                                            const LoadQuery& load_query, const PieceOf& piece_of, const Widen& widen) {
  constexpr int kStepBytes = kHopperStep * DDTREE_ROW_DIM, kPieces = Piece<kWarps>::kPieces;
  uint32_t tile = 0;  // of the block's run
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    if (number >= 1) sm90::wait(&s.planned[number % 2], (number - 1) / 2 % 2);
    const Segment& segment = s.segments[number % 2];
    if (segment.request == p.batch) return;
    const uint8_t* rows = first_row(p, segment.request, segment.step);
    int room = p.rows - segment.step * kHopperStep, left = segment.end_step - segment.step;
    Piece<kWarps> piece;
    piece.ask(rows, room - 1, piece_of(tile, 0), warp, lane);
    if (warp == 0 && lane == 0) {
#pragma unroll 1
      for (int i = 1; i < min(kAhead, left); ++i) prefetch_step(rows + i * kStepBytes, room - i * kHopperStep);
      load_query(number, segment);
    }
    __syncwarp();
#pragma unroll 1
    for (; left > 0; --left, ++tile) {
      if (warp == 0 && lane == 0 && left > kAhead) {
        prefetch_step(rows + kAhead * kStepBytes, room - kAhead * kHopperStep);
      }
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) {
        // What the compiler kept from one piece to the next would not fit in the registers.
        asm volatile("" : "+r"(warp), "+r"(lane));
        widen(tile, piece, piece_of(tile, i), warp, lane);
        // The next piece is another one of the tile, or that with which the next tile begins. It is not asked for
        // before this one is there: to ask takes its time too.
        const bool last = i + 1 == kPieces;
        if (last) rows += kStepBytes, room -= kHopperStep;
        if (!last || left > 1) piece.ask(rows, room - 1, piece_of(tile + last, (i + 1) % kPieces), warp, lane);
      }
    }
  }
}

}  // namespace widening
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_WIDEN_H_
