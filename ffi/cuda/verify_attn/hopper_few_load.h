// What a block of Hopper's kernel for few query rows has in shared memory, and how rows come there.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_FEW_LOAD_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_FEW_LOAD_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/hopper_widen.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace hopper_few {

constexpr int kWarps = 4;  // that compute
constexpr int kComputeThreads = kWarps * 32;
// And a warp that loads latents, one that loads rotary elements, one that plans and one that lists what is to be
// combined. Or, where the cache is of e4m3, eight warps that widen it; then those that compute plan and list.
constexpr int kWideners = 8;
template <typename Cache>
constexpr int kThreads = kComputeThreads + (sizeof(Cache) == 2 ? 4 : kWideners) * 32;
constexpr int kBoxes = DDTREE_ROW_DIM / 64;
constexpr int kLatentBoxes = DDTREE_LATENT_DIM / 64;
constexpr uint32_t kGroup = 1;  // the named barrier of those that compute

template <int kRows, typename Cache>
struct Shared {
  static constexpr bool kBf16 = sizeof(Cache) == 2;
  static constexpr int kBuffers = kRows <= 16 && kBf16 ? 3 : 2;
  static constexpr int kRotaries = kRows <= 16 && kBf16 ? 1 : 2;
  uint8_t query[kBoxes][kRows * 128];
  uint8_t latents[kBuffers][kLatentBoxes][sm90::kBoxBytes];
  uint8_t rotary[kRotaries][sm90::kBoxBytes];
  uint8_t weights[kRows * 128];
  float maxima[kRows][kWarps];
  float sums[kRows][kWarps];
  float greatest[2][kRows][kWarps];  // of the output's halves
  uint64_t full[kBuffers][2];  // a half of a buffer is there
  uint64_t empty[kBuffers];    // it may be overwritten
  uint64_t rotary_full[kRotaries], rotary_empty[kRotaries];
  uint64_t query_full, query_empty;
  uint64_t finished;  // all of a segment is done and read
  // This segment and the next one; loads may be a segment ahead.
  Segment segments[2];
  uint64_t planned[2];  // what lies there is new, from the second segment on
  Run run;
  int needed[kTries];
  Scales scales;
};

// Calls `load` for each segment of the block's run, of which there is one in a cluster, as one thread that loads.
template <bool kCluster, int kRows, typename Load>
__device__ __forceinline__ void for_segments(const Problem& p, Shared<kRows, __nv_bfloat16>& s, const Load& load) {
  for (uint32_t number = 0; !kCluster || number < 1; ++number) {
    if (number >= 1) sm90::wait(&s.planned[number % 2], (number - 1) / 2 % 2);
    const Segment& segment = s.segments[number % 2];
    if (segment.request == p.batch) return;
    load(number, segment);
  }
}

template <int kRows, typename Cache>
__device__ __forceinline__ void load_query(const Problem& p, Shared<kRows, Cache>& s, const CUtensorMap* query_map,
                                           uint32_t number, int request) {
  const int rows = p.nodes * p.heads;
  sm90::wait(&s.query_empty, number % 2 ^ 1);
  sm90::arrive_expecting(&s.query_full, kBoxes * rows * 128);
  for (int box = 0; box < kBoxes; ++box) {
    sm90::load_box(s.query[box], query_map, &s.query_full, request * rows, box, 0);
  }
}

template <bool kCluster, int kRows>
__device__ void load_latents(const Problem& p, Shared<kRows, __nv_bfloat16>& s, const CUtensorMap* query_map,
                             const CUtensorMap* cache_map) {
  constexpr int kBuffers = Shared<kRows, __nv_bfloat16>::kBuffers;
  const int layer = layer_of(p.layer, p.layers);
  int buffer = 0;
  uint32_t phase = 0;
  for_segments<kCluster>(p, s, [&](uint32_t number, const Segment& segment) {
    const int request = segment.request, plane = layer * p.batch + request, end_step = segment.end_step;
    load_query(p, s, query_map, number, request);
    for (int step = segment.step; step < end_step; ++step) {
      sm90::wait(&s.empty[buffer], phase ^ 1);
      for (int half = 0; half < 2; ++half) {
        sm90::arrive_expecting(&s.full[buffer][half], kLatentBoxes / 2 * sm90::kBoxBytes);
        for (int box = half * kLatentBoxes / 2; box < (half + 1) * kLatentBoxes / 2; ++box) {
          sm90::load_box(s.latents[buffer][box], cache_map, &s.full[buffer][half], step * kHopperStep, box, plane);
        }
      }
      if (++buffer == kBuffers) buffer = 0, phase ^= 1;
    }
  });
}

template <bool kCluster, int kRows>
__device__ void load_rotary(const Problem& p, Shared<kRows, __nv_bfloat16>& s, const CUtensorMap* cache_map) {
  constexpr int kRotaries = Shared<kRows, __nv_bfloat16>::kRotaries;
  const int layer = layer_of(p.layer, p.layers);
  uint32_t tile = 0;
  for_segments<kCluster>(p, s, [&](uint32_t, const Segment& segment) {
    const int plane = layer * p.batch + segment.request, end_step = segment.end_step;
    for (int step = segment.step; step < end_step; ++step, ++tile) {
      sm90::wait(&s.rotary_empty[tile % kRotaries], tile / kRotaries % 2 ^ 1);
      sm90::arrive_expecting(&s.rotary_full[tile % kRotaries], sm90::kBoxBytes);
      sm90::load_box(s.rotary[tile % kRotaries], cache_map, &s.rotary_full[tile % kRotaries], step * kHopperStep,
                     kLatentBoxes, plane);
    }
  });
}

// What the warps that widen e4m3 do, of which this is `warp`.
template <int kRows>
__device__ __forceinline__ void widen_whole_tiles(const Problem& p, Shared<kRows, uint8_t>& s,
                                                  const CUtensorMap* query_map, int warp, int lane) {
  static_assert(Shared<kRows, uint8_t>::kBuffers == 2 && Shared<kRows, uint8_t>::kRotaries == 2, "tile % 2 is of both");
  const auto load = [&](uint32_t number, const Segment& segment) {
    load_query(p, s, query_map, number, segment.request);
  };
  const auto whole = [](uint32_t, int) { return 0; };
  const auto widen = [&](uint32_t tile, const widening::Piece<kWideners>& piece, int, int warp, int lane) {
    const int buffer = tile % 2;
    sm90::wait(&s.empty[buffer], tile / 2 % 2 ^ 1);
    sm90::wait(&s.rotary_empty[buffer], tile / 2 % 2 ^ 1);
    piece.store(s.latents[buffer][0], s.rotary[buffer], 0, warp, lane);
    sm90::fence_writes();
    __syncwarp();
    if (lane == 0) {
      for (int half = 0; half < 2; ++half) sm90::arrive(&s.full[buffer][half]);
      sm90::arrive(&s.rotary_full[buffer]);
    }
  };
  widening::widen_tiles<kWideners>(p, s, warp, lane, load, whole, widen);
}

}  // namespace hopper_few
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_FEW_LOAD_H_
