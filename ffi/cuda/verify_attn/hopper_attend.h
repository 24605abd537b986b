// What the two warpgroups of the Hopper kernel compute: scores, softmax and output of a block's tiles.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_ATTEND_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_ATTEND_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/cluster.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/hopper_shared.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace hopper {

// Makes a buffer's latent elements zero from row `end` on, and what is not finite in rows [first, end). A node's row
// may be NaN, and nodes that do not see it multiply it by zero; by now it has made the scores of those that do see it
// NaN.
__device__ __forceinline__ void clear_not_finite(uint8_t* keys, int first, int end, int thread) {
#pragma unroll 1
  for (int i = first * 8 + thread; i < kTileRows * 8; i += kGroupThreads) {
#pragma unroll 1
    for (int box = 0; box < 2 * kHalfBoxes; ++box) {
      uint4& x = reinterpret_cast<uint4*>(keys + box * sm90::kBoxBytes)[i];
      x = i / 8 < end ? finite(x) : make_uint4(0, 0, 0, 0);
    }
  }
}

// Starts the matmul of the queries with half `kHalf` of tile `tile`; with kFirst the scores begin with it. A warpgroup
// must issue faster than the tensor cores work, so nothing but matmuls is between the matmuls of a half. What of the
// queries is `held` in registers spares reads of shared memory, which limits these matmuls.
//
// The first warpgroup's last half is two groups: the second one begins when the first of them is done. The rotary
// elements of an e4m3 tile are there when both halves are.
template <int kSide, int kHalf, bool kFirst, typename Cache>
__device__ __forceinline__ void start_scores(Shared& s, uint32_t tile, const uint32_t (&held)[kHeld<Cache> + 1][4],
                                             float (&score)[32]) {
  constexpr bool kBf16 = sizeof(Cache) == 2;
  constexpr int kEnd = kBf16 ? end_box(kHalf) : first_box(kHalf) + kHalfBoxes + !kFirst;
  const uint64_t query = sm90::along_rows(sm90::shared_address(s.query));
  const uint64_t keys = sm90::along_rows(sm90::shared_address(s.keys[kSide]));
  sm90::wait(&s.full[kSide][kHalf], tile / 2 % 2);
  sm90::wgmma_fence();
#pragma unroll
  for (int at = first_box(kHalf); at < kEnd; ++at) {
    const int box = at < first_box(kHalf) + kHalfBoxes ? at : kBoxes - 1;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = box * sm90::kBoxBytes + k * 32;
      const bool add = !kFirst || at > first_box(kHalf) || k > 0;
      const int depth = box * 4 + k - (kDepths - kHeld<Cache>);
      if (kSide == 0 && box == kBoxes - kHandOver && k == 0) sm90::wgmma_commit();
      if (depth >= 0) {
        sm90::multiply_64(score, held[max(depth, 0)], sm90::further(keys, offset), add);
      } else {
        sm90::multiply_64(score, sm90::further(query, offset), sm90::further(keys, offset), add);
      }
    }
  }
  sm90::wgmma_commit();
}

// The scores of a cluster block's first tile, each box as it arrives.
__device__ __forceinline__ void start_first_scores(Shared& s, float (&score)[32]) {
  const uint64_t query = sm90::along_rows(sm90::shared_address(s.query));
  const uint64_t keys = sm90::along_rows(sm90::shared_address(s.keys[0]));
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    sm90::wait(&s.arrived[box], 0);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = box * sm90::kBoxBytes + k * 32;
      sm90::multiply_64(score, sm90::further(query, offset), sm90::further(keys, offset), box > 0 || k > 0);
    }
    sm90::wgmma_commit();
  }
}

// Scores of a thread's two rows to weights, as the second matmul takes them from registers: four depths of 16 cache
// rows. `factor` becomes what the output so far shrinks by.
__device__ __forceinline__ void weigh(float (&score)[32], float (&maximum)[2], float (&sum)[2], float (&factor)[2],
                                      uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = maximum[half];
#pragma unroll
    for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(score[n * 4 + half * 2], score[n * 4 + half * 2 + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const bool replaced = top > maximum[half] + kSlack;
    // What nothing has been added to need not shrink.
    factor[half] = replaced && maximum[half] != -INFINITY ? power_of_two(maximum[half] - top) : 1.0f;
    if (replaced) maximum[half] = top;
    const float shift = maximum[half] == -INFINITY ? 0.0f : maximum[half];  // nothing seen so far
    sum[half] *= factor[half];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float x = power_of_two(score[n * 4 + half * 2] - shift);
      const float y = power_of_two(score[n * 4 + half * 2 + 1] - shift);
      sum[half] += x + y;
      weights[n / 2][n % 2 * 2 + half] = pack(x, y);
    }
  }
}

__device__ __forceinline__ void rescale(float (&out)[kColumns / 2], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    out[n * 4] *= factor[0];
    out[n * 4 + 1] *= factor[0];
    out[n * 4 + 2] *= factor[1];
    out[n * 4 + 3] *= factor[1];
  }
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Stores a warp's 16 rows of a warpgroup's columns, `pair` of each two elements: the thread's upper row from to[0] on,
// the one 8 below from to[1] on, where they are `real`. Goes through `staging`, 1 KB for the warp, 32 columns at a
// time: threads hold two columns of a row each, and memory wants sectors.
template <typename Element, typename Pair>
__device__ __forceinline__ void store_rows(const float (&out)[kColumns / 2], uint8_t* staging, int lane,
                                           const bool (&real)[2], Element* const (&to)[2], const Pair& pair) {
  static_assert(sizeof(Element) == 2, "a pair is a word");
  const auto chunk = [&](int row, int column) {
    return sm90::shared_address(staging) + row * 64 + ((column ^ row / 2 % 4) << 4);
  };
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 4) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = (n + i + k / 2) * 4 + k % 2 * 2;
        x[k] = pair(k % 2, out[at], out[at + 1]);
      }
      sm90::store_matrices(chunk(lane % 16, i + lane / 16), x);
    }
    __syncwarp();
    uint4 x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) x[half] = load_shared(chunk(half * 8 + lane / 4, lane % 4));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (real[half]) *reinterpret_cast<uint4*>(to[half] + (n + lane % 4) * 8) = x[half];
    }
  }
}

// The same number, from which the compiler can prepare nothing before all the loops: what it kept would not fit in the
// registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a warpgroup does; `thread` counts inside it. In a cluster, whose blocks have one segment, it returns its output
// and the maxima, and the sums are there.
template <int kSide, bool kCluster, typename Cache>
__device__ __forceinline__ void attend_side(const Problem& p, Shared& s, int thread, float (&out)[kColumns / 2],
                                            float (&maximum)[2]) {
  const int warp = thread / 32, lane = thread % 32;
  const int upper = warp * 16 + lane / 4;  // the thread's rows are this one and the one 8 below
  uint32_t tile = 0;                       // of the block's run
  constexpr bool kBf16 = sizeof(Cache) == 2;
  uint32_t held[kHeld<Cache> + 1][4];  // the last one is never used, since there is no array of none
  float score[32];
  const auto hold_query = [&](uint32_t number) {
    if (kCluster) {
      for (int box = 0; box < kBoxes; ++box) sm90::wait(&s.arrived[box], 0);
    } else {
      sm90::wait(&s.query_full, number % 2);
    }
    const int place = opaque(thread), row = place / 32 * 16 + place % 16;
    const uint32_t from = sm90::shared_address(s.query) + row * 128;
#pragma unroll
    for (int i = 0; i < kHeld<Cache>; ++i) {
      const int depth = kDepths - kHeld<Cache> + i;
      load_matrices(held[i],
                    from + depth / 4 * sm90::kBoxBytes + ((depth % 4 * 2 + place % 32 / 16 ^ row % 8) << 4));
    }
  };
  const auto begin_scores = [&] {
    start_scores<kSide, kSide, true, Cache>(s, tile, held, score);
    start_scores<kSide, kSide ^ 1, false, Cache>(s, tile, held, score);
  };
  const auto end_scores = [&] {
    if (kSide == 0) {
      // Told when they are all but done, or the tensor cores would idle while it hears of it.
      sm90::wgmma_wait<1>();
      if (lane == 0) sm90::arrive(&s.scored);
    }
    sm90::wgmma_wait<0>();
    sm90::pin(score);
  };
  if (kCluster) {
    if (kSide == 0 && s.share.lead > 0) {
      start_first_scores(s, score);
      end_scores();
    }
    hold_query(0);
  } else if (s.segments[0].request < p.batch) {
    hold_query(0);
    if (kSide == 0) {
      begin_scores();
      end_scores();
    }
  }
  for (uint32_t number = 0;; ++number) {
    if (s.segments[number % 2].request == p.batch) return;
    // Read where it is needed: registers are what a thread lacks.
    const Segment& segment = s.segments[number % 2];
    const uint32_t first = tile, end = tile + (kCluster ? step_count(s.share) : segment.end_step - segment.step);
    // The first tile with a row that not all nodes see.
    int masked = static_cast<int>(tile) + segment.length / kHopperStep - segment.step;
    if (kCluster) masked = s.share.first >= segment.length / kHopperStep ? 0 : max(masked, 0) + 1;

    float sum[2] = {}, factor[2];
    maximum[0] = maximum[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) out[i] = 0;
    sm90::wait(&s.finished, number % 2 ^ 1);  // nobody still reads sums or stored rows of the segment before
    if (!kBf16 && kSide == 1 && thread == 0) plan_segment(p, s, number + 1);  // all others are busy
    if (first % 2 != kSide && first + 1 == end && lane == 0) sm90::arrive(&s.query_empty);  // it multiplies none

    // The tile of the other warpgroup: its weights times this one's columns. The other one has seen the tile arrive.
    const auto other_tile = [&] {
      sm90::wait(&s.published[kSide ^ 1], tile / 2 % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half] = s.factor[upper + half * 8];
        maximum[half] = s.maximum[upper + half * 8];
        sum[half] *= factor[half];
      }
      // Over all rows, since the warps of a group must wait together.
      if (__builtin_expect(__any_sync(~0u, s.factor[lane] != 1.0f || s.factor[lane + 32] != 1.0f), 0)) {
        sm90::wgmma_wait<0>();  // none may be under way while registers of one change
        sm90::pin(out);
        rescale(out, factor);
      }
      sm90::wgmma_fence();
      const uint64_t weights = sm90::along_rows(sm90::shared_address(s.weights));
      const uint64_t values =
          sm90::down_rows(sm90::shared_address(s.keys[kSide ^ 1] + first_box(kSide) * sm90::kBoxBytes));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sm90::multiply_256(out, sm90::further(weights, k * 32), sm90::further(values, k * 2048));
      }
      sm90::wgmma_commit();
    };
    // A tile of this one: scores, weights, and the matmul.
    const auto own_tile = [&] {
      if (tile + 2 >= end && lane == 0) sm90::arrive(&s.query_empty);
#pragma unroll
      for (int i = 0; i < 32; ++i) score[i] *= kBf16 ? p.log2_scale : s.scales.score;
      if (__builtin_expect(static_cast<int>(tile) >= masked, 0)) {
        // Of a row that is not finite no score is.
        bool broken = false;
#pragma unroll
        for (int i = 0; i < 32; ++i) broken |= !(fabsf(score[i]) <= FLT_MAX);
        // Of the tile's first row, counted from the tree's.
        const int step = kCluster && tile == 0 ? s.share.first : segment.end_step - static_cast<int>(end - tile);
        const int row = step * kHopperStep - segment.length;
        if (sm90::any_at(kGroup + kSide, kGroupThreads, broken)) {
          clear_not_finite(s.keys[kSide], max(-row, 0), segment.nodes - row, thread);
          sm90::fence_writes();
          sm90::sync_at(kGroup + kSide, kGroupThreads);
        }
        // Of four threads with the same two rows each makes one word of what these see.
        const int place = opaque(thread), own_row = place / 32 * 16 + place % 32 / 4 + place / 2 % 2 * 8;
        const int node = min((segment.tile * kTileRows + own_row) / p.heads, segment.nodes - 1);
        const uint32_t* ancestors = p.ancestors + (static_cast<int64_t>(segment.request) * p.nodes + node) * p.words;
        const uint32_t own_word = visible(ancestors, p.words, row + place % 2 * 32, segment.nodes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const uint32_t seen = __shfl_sync(~0u, own_word, half * 2 + w, 4) >> lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              float& x = score[(w * 4 + i / 2) * 4 + half * 2 + i % 2];
              x = seen >> (i / 2 * 8 + i % 2) & 1 ? (fabsf(x) <= FLT_MAX ? x : NAN) : -INFINITY;
            }
          }
        }
      }
      uint32_t weights[4][4];
      weigh(score, maximum, sum, factor, weights);
      const auto multiply = [&] {
        sm90::wgmma_fence();
        const uint64_t values =
            sm90::down_rows(sm90::shared_address(s.keys[kSide] + first_box(kSide) * sm90::kBoxBytes));
#pragma unroll
        for (int k = 0; k < 4; ++k) sm90::multiply_256(out, weights[k], sm90::further(values, k * 2048));
        sm90::wgmma_commit();
      };
      const bool shrinks = factor[0] != 1.0f || factor[1] != 1.0f;
      if (kSide == 0) {
        sm90::wgmma_wait<0>();
        sm90::pin(out);
        if (__builtin_expect(__any_sync(~0u, shrinks), 0)) rescale(out, factor);
      } else {
        // No scores are under way beside this softmax, only the matmul with the other's tile: when that ends, this
        // matmul must stand in line, and cannot wait until the weights have been published. Its operands are only read
        // until it is done.
        if (__builtin_expect(sm90::any_at(kGroup + kSide, kGroupThreads, shrinks), 0)) {
          sm90::wgmma_wait<0>();  // none may be under way while registers of one change
          sm90::pin(out);
          rescale(out, factor);
        }
        multiply();
        sm90::wgmma_wait<1>();
        if (tile > first && lane == 0) sm90::arrive(&s.empty[0][1]);
      }
      sm90::sync_at(kGroup + kSide, kGroupThreads);  // no warp's matmul still reads the weights of the tile before
      {
        const int place = opaque(thread), row = place / 32 * 16 + place % 16;
        const uint32_t to = sm90::shared_address(s.weights) + row * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) sm90::store_matrices(to + ((k * 2 + place % 32 / 16 ^ row % 8) << 4), weights[k]);
      }
      if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          s.factor[upper + half * 8] = factor[half];
          s.maximum[upper + half * 8] = maximum[half];
        }
      }
      sm90::fence_writes();
      sm90::arrive(&s.published[kSide]);
      if (kSide == 0) multiply();
      sm90::wgmma_wait<0>();
      sm90::pin(out);
      if (lane == 0) sm90::arrive(&s.empty[kSide][kSide]);
    };
    for (bool scored = first % 2 == kSide && first < end; scored || tile + 1 < end; scored = false) {
      if (!scored) {
        if (kSide == 0) {
          other_tile();
          start_scores<0, 0, true, Cache>(s, tile + 1, held, score);
          sm90::wgmma_wait<1>();
          sm90::pin(out);
          if (lane == 0) sm90::arrive(&s.empty[1][0]);
          start_scores<0, 1, false, Cache>(s, tile + 1, held, score);
          end_scores();
        } else {
          // After the other's scores: their softmax then goes on beside this matmul.
          sm90::wait(&s.scored, tile / 2 % 2);
          start_scores<1, 1, true, Cache>(s, tile + 1, held, score);
          start_scores<1, 0, false, Cache>(s, tile + 1, held, score);
          other_tile();
          sm90::wgmma_wait<1>();
          sm90::pin(score);
        }
        ++tile;
      }
      own_tile();
      ++tile;
    }
    if (tile < end) {
      if (kSide == 1) sm90::wait(&s.scored, tile / 2 % 2);  // every phase of a barrier is waited for
      other_tile();
      sm90::wgmma_wait<0>();
      sm90::pin(out);
      if (lane == 0) sm90::arrive(&s.empty[kSide ^ 1][kSide]);
      ++tile;
    }

    // The next segment is planned. Also, whoever plans has then seen the end of the one before: it could not tell two
    // ends from none.
    if (!kCluster) sm90::wait(&s.planned[(number + 1) % 2], number / 2 % 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if (lane % 4 == 0) s.sum[kSide][upper + half * 8] = sum[half];
    }
    sm90::arrive(&s.summed);
    if (kCluster) {
      sm90::wait(&s.summed, 0);
      return;
    }
    const auto write = [&] {
      sm90::wait(&s.summed, number % 2);
      const bool whole = segment.step == 0 && segment.end_step == segment.steps;
      const int place = opaque(thread), lane = place % 32, row = place / 32 * 16 + lane / 4;
      uint8_t* staging = s.weights + (kSide * 4 + place / 32) * 1024;  // all have read the last weights
      const int query_row = segment.tile * kTileRows + row, real_rows = segment.nodes * p.heads;
      const bool real[2] = {query_row < real_rows, query_row + 8 < real_rows};
      const float total[2] = {s.sum[0][row] + s.sum[1][row], s.sum[0][row + 8] + s.sum[1][row + 8]};
      if (whole) {
        const int64_t index = static_cast<int64_t>(segment.request) * p.nodes * p.heads + query_row;
        __nv_bfloat16* to = p.out + index * DDTREE_LATENT_DIM + kSide * kColumns;
        const float scale = kBf16 ? 1.0f : s.scales.value;
        const float inverse[2] = {reciprocal(total[0]) * scale, reciprocal(total[1]) * scale};
        const auto pair = [&](int half, float x, float y) { return pack(x * inverse[half], y * inverse[half]); };
        store_rows<__nv_bfloat16>(out, staging, lane, real, {to, to + 8 * DDTREE_LATENT_DIM}, pair);
      } else {
        __half* split = reinterpret_cast<__half*>(split_of<__half>(p, blockIdx.x, segment.split));
        float down[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float greatest = 0;
#pragma unroll
          for (int n = 0; n < kColumns / 4; ++n) greatest = fmaxf(greatest, fabsf(out[n / 2 * 4 + half * 2 + n % 2]));
          greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 1));
          greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 2));
          const HalfScale scale(greatest);
          down[half] = scale.down;
          if (real[half] && lane % 4 == 0) {
            SplitRow* softmax = reinterpret_cast<SplitRow*>(split + kTileRows * DDTREE_LATENT_DIM) + row + half * 8;
            softmax->scale[kSide] = scale.up;
            if (kSide == 0) *reinterpret_cast<float2*>(softmax) = make_float2(maximum[half], total[half]);
          }
        }
        __half* to = split + row * DDTREE_LATENT_DIM + kSide * kColumns;
        const auto pair = [&](int half, float x, float y) { return pack_half(x * down[half], y * down[half]); };
        store_rows<__half>(out, staging, lane, real, {to, to + 8 * DDTREE_LATENT_DIM}, pair);
      }
    };
    const bool more = s.segments[(number + 1) % 2].request < p.batch;
    if (more && tile % 2 == kSide) {
      // The next matmuls go on while this is written.
      hold_query(number + 1);
      begin_scores();
      write();
      end_scores();
    } else {
      write();
      if (more) hold_query(number + 1);
    }
    sm90::arrive(&s.finished);
  }
}

}  // namespace hopper
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_ATTEND_H_
