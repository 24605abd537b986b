// How cache rows come to shared memory for verify_attn's portable kernel.
//
// A stage holds 32 rows as nine slices of 64 elements, a slice as the 128-byte swizzle of TMA has it: the 16-byte chunk
// c of a slice's row r lies at r * 128 + ((c ^ r % 8) << 4), which keeps ldmatrix free of bank conflicts.
//
// From sm_90 on one thread asks for a step of bfloat16, a box of a tensor map. What TMA brings beyond a request's rows
// are rows of the same request, or zeros: nodes do not see them. Else every thread copies chunks of 16 bytes, which
// hold up the reads of shared memory that matmuls wait for.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PORTABLE_ROWS_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PORTABLE_ROWS_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

#include "ffi/cuda/ptx.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace portable {

constexpr int kThreads = 256;
constexpr int kStep = 32;  // cache rows of a step
constexpr int kRowBytes = DDTREE_ROW_DIM * 2;
constexpr int kStageBytes = kStep * kRowBytes;
constexpr int kSlice = kStep * 128;  // bytes from 64 elements of a row to its next 64
constexpr int kHalfStep = 16 * 128;  // from a row to the one 16 further on
constexpr int kStages = 2;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasTma = true;
#else
constexpr bool kHasTma = false;
#endif
// Whether rows come as boxes.
template <typename Cache>
constexpr bool kBoxes = kHasTma && sizeof(Cache) == 2;

// Starts the copy of cache rows [first, first + 32) of one request to a stage; rows from `end` on become zeros. A warp
// copies four rows.
__device__ __forceinline__ void copy_step(uint32_t stage, const __nv_bfloat16* cache, int first, int end,
                                          uint32_t warp, uint32_t lane) {
  const uint32_t row = warp * 4, tail_row = row + lane / 8;
  const char* from = reinterpret_cast<const char*>(cache + static_cast<int64_t>(first + row) * DDTREE_ROW_DIM);
  const uint32_t to = stage + lane / 8 * kSlice + row * 128;
  const uint32_t tail_to = stage + 8 * kSlice + tail_row * 128 + ((lane % 8 ^ tail_row % 8) << 4);
  const uint32_t tail_from = lane / 8 * kRowBytes + 1024 + lane % 8 * 16;
  if (first + kStep <= end) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t chunk = to + j * 128 + ((lane % 8 ^ (row % 8 + j)) << 4);
      copy16(chunk, from + lane * 16 + j * kRowBytes);
      copy16(chunk + 4 * kSlice, from + lane * 16 + j * kRowBytes + 512);
    }
    copy16(tail_to, from + tail_from);
  } else {
    const char* inside = reinterpret_cast<const char*>(cache);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t chunk = to + j * 128 + ((lane % 8 ^ (row % 8 + j)) << 4);
      const bool valid = first + static_cast<int>(row) + j < end;
      const char* source = valid ? from + lane * 16 + j * kRowBytes : inside;
      copy16_or_zero(chunk, source, valid);
      copy16_or_zero(chunk + 4 * kSlice, source + 512, valid);
    }
    const bool valid = first + static_cast<int>(tail_row) < end;
    copy16_or_zero(tail_to, valid ? from + tail_from : inside, valid);
  }
}

// The same of e4m3 as it lies: a step's rows are one run of bytes.
__device__ __forceinline__ void copy_step(uint32_t landing, const uint8_t* cache, int first, int end, uint32_t warp,
                                          uint32_t lane) {
  constexpr int kRowChunks = DDTREE_ROW_DIM / 16;
  const int thread = static_cast<int>(warp * 32 + lane), chunks = min(end - first, kStep) * kRowChunks;
  const uint8_t* from = cache + static_cast<int64_t>(first) * DDTREE_ROW_DIM;
#pragma unroll
  for (int j = 0; j < kStep * kRowChunks; j += kThreads) {
    const int i = thread + j;
    if (j + kThreads <= kStep * kRowChunks || i < kStep * kRowChunks) {
      copy16_or_zero(landing + i * 16, i < chunks ? from + i * 16 : cache, i < chunks);
    }
  }
}

// Rows [first, first + 32) of a plane of the map come to a stage.
__device__ __forceinline__ void bring_step(uint8_t* stage, uint64_t* arrived, const CUtensorMap* map, int first,
                                           int plane) {
  sm90::arrive_expecting(arrived, kStageBytes);
  sm90::load_box(stage, map, arrived, first, 0, plane);
}

// Where in the stages the rows of a block's step land: bfloat16 where they are used, e4m3 behind the one stage that
// they widen into.
template <typename Cache>
__device__ __forceinline__ uint32_t landing_of(int number) {
  const uint32_t place = static_cast<uint32_t>(number) % kStages;
  return sizeof(Cache) == 2 ? place * kStageBytes : kStageBytes + place * (kStageBytes / 2);
}

// Two e4m3 elements, in the high bytes of the halves of `spread`, as bfloat16: as bits of bfloat16 they are too small
// by 2^120, subnormals included. NaN comes out as 480, which is no e4m3 number.
__device__ __forceinline__ uint32_t widen_pair(uint32_t spread) {
  const uint32_t bits = (spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u);
  const __nv_bfloat162 power = __halves2bfloat162(__ushort_as_bfloat16(0x7b80), __ushort_as_bfloat16(0x7b80));
  const __nv_bfloat162 pair = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), power);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Makes 480 NaN.
__device__ __forceinline__ uint32_t restore_nan(uint32_t pair) {
  if ((pair & 0x7fffu) == 0x43f0u) pair |= 0x7f80u;
  if ((pair & 0x7fff0000u) == 0x43f00000u) pair |= 0x7f800000u;
  return pair;
}

// Spreads 8 elements from `from` into the 16-byte chunk at `to`.
__device__ __forceinline__ void widen_chunk(const uint8_t* from, uint8_t* to) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  uint4 y = make_uint4(widen_pair(__byte_perm(x.x, 0, 0x1404)), widen_pair(__byte_perm(x.x, 0, 0x3424)),
                       widen_pair(__byte_perm(x.y, 0, 0x1404)), widen_pair(__byte_perm(x.y, 0, 0x3424)));
  // A byte of 0x7f or 0xff carries into its eighth bit.
  if ((((x.x & 0x7f7f7f7fu) + 0x01010101u) | ((x.y & 0x7f7f7f7fu) + 0x01010101u)) & 0x80808080u) {
    y = make_uint4(restore_nan(y.x), restore_nan(y.y), restore_nan(y.z), restore_nan(y.w));
  }
  *reinterpret_cast<uint4*>(to) = y;
}

// Widens a step of e4m3 rows into a stage. A warp takes four rows.
__device__ __forceinline__ void widen_step(const uint8_t* landing, uint8_t* stage, uint32_t warp, uint32_t lane) {
  const uint32_t row = warp * 4, tail_row = row + lane / 8;
  const uint8_t* from = landing + row * DDTREE_ROW_DIM + lane * 8;
  uint8_t* to = stage + lane / 8 * kSlice + row * 128;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint8_t* chunk = to + j * 128 + ((lane % 8 ^ (row % 8 + j)) << 4);
    widen_chunk(from + j * DDTREE_ROW_DIM, chunk);
    widen_chunk(from + j * DDTREE_ROW_DIM + 256, chunk + 4 * kSlice);
  }
  widen_chunk(landing + tail_row * DDTREE_ROW_DIM + 512 + lane % 8 * 8,
              stage + 8 * kSlice + tail_row * 128 + ((lane % 8 ^ tail_row % 8) << 4));
}

// Makes what is not finite in a stage's latent elements zero. A node's row may be NaN, and nodes that do not see it
// multiply it by zero; by now it has made the scores of those that do see it NaN.
__device__ __forceinline__ void clear_not_finite(uint8_t* stage, uint32_t thread) {
  uint4* chunks = reinterpret_cast<uint4*>(stage);
#pragma unroll 1
  for (uint32_t i = thread; i < kStep * DDTREE_LATENT_DIM / 8; i += kThreads) chunks[i] = finite(chunks[i]);
  if constexpr (kHasTma) sm90::fence_writes();  // before the next rows come to the same place
}

}  // namespace portable
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PORTABLE_ROWS_H_
