// verify_attn in bfloat16 for Hopper (sm_90a) where a request has at most 32 query rows, as in plain decoding.
//
// Problem: one tile per request, of 16 or 32 rows, over the request's cache, 64 cache rows per step.
//
// Bound: memory, and so the bytes that are under way.
//
// Schedule. The matmuls are turned around: a tile of 64 cache rows is the 64-row operand of both, the queries are the
// 16 or 32 columns of the other, and scores and output come out transposed. So the query takes a quarter of the shared
// memory that 64 rows would, the tensor cores do no work for rows that are not there, and all of the output is one
// warpgroup's. What is left of shared memory are buffers for tiles: while one is multiplied, two are on their way. A
// tile's rotary elements, which only the scores need, have a buffer of their own. Rows of e4m3 come by warps that
// upcast them (hopper_widen.h), to two buffers: memory is not their bound.
//
// Result. On an H200 8 requests of 32,768 tokens, 16 heads and one node take 97 us, 3.1 TB/s; over e4m3 82 us.
//
// What a block holds and how it is loaded is in hopper_few_load.h.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <stdint.h>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/cluster.h"
#include "ffi/cuda/verify_attn/hopper.h"
#include "ffi/cuda/verify_attn/hopper_few_load.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/cuda/verify_attn/tensor_map.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace hopper_few {
namespace {

// Two columns' weights of a thread's upper or lower row.
template <int kCount>
__device__ __forceinline__ uint32_t pack_column(const float (&weight)[kCount], int n, int half) {
  return pack(weight[n * 4 + half * 2], weight[n * 4 + half * 2 + 1]);
}

template <typename Add>
__device__ __forceinline__ float over_warps(const float (&x)[kWarps], const Add& add) {
  const float4 all = *reinterpret_cast<const float4*>(x);
  return add(add(all.x, all.y), add(all.z, all.w));
}

// What the warpgroup does. Of a matmul's 64 rows a thread holds warp * 16 + lane / 4 and the one 8 below; of its
// columns, which are query rows, 8 n + lane % 4 * 2 and the next one. A thread's column i is i / 2 * 8 + lane % 4 * 2 +
// i % 2.
template <int kRows, bool kCluster, typename Cache>
__device__ __forceinline__ void attend_rows(const Problem& p, Shared<kRows, Cache>& s, int thread) {
  constexpr bool kBf16 = Shared<kRows, Cache>::kBf16;
  constexpr int kBuffers = Shared<kRows, Cache>::kBuffers, kRotaries = Shared<kRows, Cache>::kRotaries;
  constexpr int kColumns = kRows / 4;
  const int warp = thread / 32, lane = thread % 32;
  const auto query_row = [&](int column) { return column / 2 * 8 + lane % 4 * 2 + column % 2; };
  const auto in_column = [](int i) { return i / 4 * 2 + i % 2; };  // accumulator i
  const uint64_t query = sm90::along_rows(sm90::shared_address(s.query));
  const uint64_t weights = sm90::along_rows(sm90::shared_address(s.weights));
  int buffer = 0, rotary = 0;
  uint32_t phase = 0, rotary_phase = 0;
  for (uint32_t number = 0;; ++number) {
    const Segment& segment = s.segments[number % 2];
    if (segment.request == p.batch) return;
    if (!kBf16 && thread == 0) {  // all others are busy
      if (number >= 1) sm90::wait(&s.finished, (number - 1) % 2);
      plan_segment(p, s, number + 1);
    }
    const int length = segment.length, end_step = segment.end_step;
    float out[kLatentBoxes][kRows / 2], maximum[kColumns], sum[kColumns];
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) out[box][i] = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) maximum[c] = -INFINITY, sum[c] = 0;
    sm90::wait(&s.query_full, number % 2);

#pragma unroll 1
    for (int step = segment.step; step < end_step; ++step) {
      const uint32_t tile = sm90::shared_address(s.latents[buffer]);
      // Two sums, since a matmul waits for the one before that adds to the same.
      float score[kRows / 2], other[kRows / 2];
      const auto score_box = [&](uint64_t keys, int box) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sm90::multiply_columns<0>(k % 2 == 0 ? score : other, sm90::further(keys, k * 32),
                                    sm90::further(query, box * kRows * 128 + k * 32), box > 0 || k > 1);
        }
      };
      const uint64_t keys = sm90::along_rows(tile);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sm90::wait(&s.full[buffer][half], phase);
        sm90::wgmma_fence();
#pragma unroll
        for (int box = half * kLatentBoxes / 2; box < (half + 1) * kLatentBoxes / 2; ++box) {
          score_box(sm90::further(keys, box * sm90::kBoxBytes), box);
        }
        sm90::wgmma_commit();
      }
      sm90::wait(&s.rotary_full[rotary], rotary_phase);
      sm90::wgmma_fence();
      score_box(sm90::along_rows(sm90::shared_address(s.rotary[rotary])), kLatentBoxes);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      sm90::pin(score);
      sm90::pin(other);
      if (lane == 0) sm90::arrive(&s.rotary_empty[rotary]);
      if (step + 1 == end_step && lane == 0) sm90::arrive(&s.query_empty);
      if (++rotary == kRotaries) rotary = 0, rotary_phase ^= 1;

#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        score[i] = (score[i] + other[i]) * (kBf16 ? p.log2_scale : s.scales.score);
      }
      const int key = step * kHopperStep;
      if (__builtin_expect(key + kHopperStep > length, 0)) {
        // A node's row may be NaN, and nodes that do not see it multiply it by zero; by now it has made the scores of
        // those that do see it NaN. Of a row that is not finite no score is.
        bool broken = false;
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) broken |= !(fabsf(score[i]) <= FLT_MAX);
        if (sm90::any_at(kGroup, kComputeThreads, broken)) {
          const int end = length + segment.nodes - key;
#pragma unroll 1
          for (int i = max(length - key, 0) * 8 + thread; i < kHopperStep * 8; i += kComputeThreads) {
#pragma unroll 1
            for (int box = 0; box < kLatentBoxes; ++box) {
              uint4& x = reinterpret_cast<uint4*>(s.latents[buffer][box])[i];
              x = i / 8 < end ? finite(x) : make_uint4(0, 0, 0, 0);
            }
          }
          sm90::fence_writes();
          sm90::sync_at(kGroup, kComputeThreads);
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int node = min(query_row(c) / p.heads, segment.nodes - 1);
          const uint32_t* ancestors = p.ancestors + (static_cast<int64_t>(segment.request) * p.nodes + node) * p.words;
          const uint32_t seen = visible(ancestors, p.words, key + warp * 16 - length, segment.nodes) >> lane / 4;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = score[c / 2 * 4 + half * 2 + c % 2];
            x = seen >> half * 8 & 1 ? (fabsf(x) <= FLT_MAX ? x : NAN) : -INFINITY;
          }
        }
      }

      bool exceeds = false;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) exceeds |= score[i] > maximum[in_column(i)] + kSlack;
      // Also, no warp's matmul still reads the weights of the tile before.
      if (sm90::any_at(kGroup, kComputeThreads, exceeds)) {
        float top[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          top[c] = fmaxf(score[c / 2 * 4 + c % 2], score[c / 2 * 4 + 2 + c % 2]);
#pragma unroll
          for (int d = 4; d < 32; d *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], d));
          if (lane < 4) s.maxima[query_row(c)][warp] = top[c];
        }
        sm90::sync_at(kGroup, kComputeThreads);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float greatest = over_warps(s.maxima[query_row(c)], [](float x, float y) { return fmaxf(x, y); });
          if (!(greatest > maximum[c] + kSlack)) continue;
          const float factor = power_of_two(maximum[c] - greatest);
          maximum[c] = greatest;
          sum[c] *= factor;
#pragma unroll
          for (int box = 0; box < kLatentBoxes; ++box) {
            out[box][c / 2 * 4 + c % 2] *= factor;
            out[box][c / 2 * 4 + 2 + c % 2] *= factor;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int c = in_column(i);
        score[i] = power_of_two(score[i] - (maximum[c] == -INFINITY ? 0.0f : maximum[c]));
        sum[c] += score[i];
      }
#pragma unroll
      for (int j = 0; j < kRows / 16; ++j) {
        const uint32_t pairs[4] = {pack_column(score, j * 2, 0), pack_column(score, j * 2, 1),
                                   pack_column(score, j * 2 + 1, 0), pack_column(score, j * 2 + 1, 1)};
        const int row = (j * 2 + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        sm90::store_matrices_transposed(sm90::shared_address(s.weights) + row * 128 + ((chunk ^ row % 8) << 4), pairs);
      }
      sm90::fence_writes();
      sm90::sync_at(kGroup, kComputeThreads);
      sm90::wgmma_fence();
      const uint64_t values = sm90::down_rows(tile);
#pragma unroll
      for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sm90::multiply_columns<1>(out[box], sm90::further(values, box * sm90::kBoxBytes + k * 2048),
                                    sm90::further(weights, k * 32), 1);
        }
      }
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
#pragma unroll
      for (int box = 0; box < kLatentBoxes; ++box) sm90::pin(out[box]);
      if (lane == 0) sm90::arrive(&s.empty[buffer]);
      if (++buffer == kBuffers) buffer = 0, phase ^= 1;
    }

#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[c] += __shfl_xor_sync(~0u, sum[c], d);
      if (lane < 4) s.sums[query_row(c)][warp] = sum[c];
    }
    const bool whole = !kCluster && segment.step == 0 && end_step == segment.steps;
    if (!whole) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float top = 0;
#pragma unroll
          for (int i = 0; i < kLatentBoxes; ++i) {
            top = fmaxf(top, fabsf(out[side * kLatentBoxes / 2 + i / 2][c / 2 * 4 + i % 2 * 2 + c % 2]));
          }
#pragma unroll
          for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
          if (lane < 4) s.greatest[side][query_row(c)][warp] = top;
        }
      }
    }
    sm90::sync_at(kGroup, kComputeThreads);  // also, in a cluster, no matmul reads the latents any more
    const int real = segment.nodes * p.heads;
    __nv_bfloat16* rows =
        p.out + static_cast<int64_t>(segment.request) * p.nodes * p.heads * DDTREE_LATENT_DIM;
    // What is no whole tile is left to be combined, in a cluster in shared memory.
    Left* left = reinterpret_cast<Left*>(s.latents);
    __half* split =
        kCluster ? left->rows[0] : reinterpret_cast<__half*>(split_of<__half>(p, blockIdx.x, segment.split));
    constexpr int kStride = kCluster ? sizeof(Left::rows[0]) / sizeof(__half) : DDTREE_LATENT_DIM;
    SplitRow* softmax = kCluster ? left->softmax : reinterpret_cast<SplitRow*>(split + kTileRows * DDTREE_LATENT_DIM);
    // Of two threads that hold one column of two rows each, one takes both columns of one row.
    const int odd = lane / 4 % 2;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const int row = n * 8 + lane % 4 * 2 + odd;
      const float total = over_warps(s.sums[row], [](float x, float y) { return x + y; });
      const float inverse = (kBf16 ? 1.0f : s.scales.value) / total;
      float down[2] = {};
      if (!whole) {
        float up[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const HalfScale scale(over_warps(s.greatest[side][row], [](float x, float y) { return fmaxf(x, y); }));
          down[side] = scale.down;
          up[side] = scale.up;
        }
        if (warp == 0 && lane < 8 && row < real) {
          softmax[row] = {
              .maximum = odd ? maximum[n * 2 + 1] : maximum[n * 2], .sum = total, .scale = {up[0], up[1]}};
        }
      }
#pragma unroll
      for (int box = 0; box < kLatentBoxes; ++box) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = out[box][n * 4 + half * 2], high = out[box][n * 4 + half * 2 + 1];
          const float got = __shfl_xor_sync(~0u, odd ? low : high, 4);
          const float x = odd ? got : low, y = odd ? high : got;
          const int column = box * 64 + warp * 16 + half * 8 + lane / 8 * 2;
          if (row >= real) continue;
          if (whole) {
            *reinterpret_cast<uint32_t*>(rows + static_cast<int64_t>(row) * DDTREE_LATENT_DIM + column) =
                pack(x * inverse, y * inverse);
          } else {
            const float f = down[box / (kLatentBoxes / 2)];
            *reinterpret_cast<__half2*>(split + row * kStride + column) = __floats2half2_rn(x * f, y * f);
          }
        }
      }
    }
    if (kCluster) return;
    // The next segment is planned. Also, whoever plans has then seen the end of the one before: it could not tell two
    // ends from none.
    sm90::wait(&s.planned[(number + 1) % 2], number / 2 % 2);
    sm90::arrive(&s.finished);
  }
}

template <int kRows, bool kCluster, typename Cache>
__global__ void __launch_bounds__(kThreads<Cache>, 1)
    attend_few(const Problem p, const __grid_constant__ CUtensorMap query_map,
               const __grid_constant__ CUtensorMap cache_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  using Own = Shared<kRows, Cache>;
  Own& s = *reinterpret_cast<Own*>(memory);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
  if (kCluster && thread == kComputeThreads) {
    s.segments[0] = cluster_segment(p, blockIdx.x, cluster::size(), false);
  } else if (thread == kComputeThreads + 32) {
    sm90::prefetch(&query_map);
    if (Own::kBf16) sm90::prefetch(&cache_map);
    constexpr int kLoaders = Own::kBf16 ? 1 : kWideners;
    for (int i = 0; i < Own::kBuffers; ++i) {
      for (int half = 0; half < 2; ++half) sm90::init_barrier(&s.full[i][half], kLoaders);
      sm90::init_barrier(&s.empty[i], kWarps);
    }
    for (int i = 0; i < Own::kRotaries; ++i) {
      sm90::init_barrier(&s.rotary_full[i], kLoaders);
      sm90::init_barrier(&s.rotary_empty[i], kWarps);
    }
    for (int i = 0; i < 2; ++i) sm90::init_barrier(&s.planned[i], 1);
    sm90::init_barrier(&s.query_full, 1);
    sm90::init_barrier(&s.query_empty, kWarps);
    sm90::init_barrier(&s.finished, kComputeThreads);
    sm90::fence_barrier_init();
  } else if (!Own::kBf16 && thread == kComputeThreads + 64) {
    s.scales = scales_of(p);
  } else if (warp < kWarps) {
    // Rows that no load fills: whatever memory held would make the others wait.
    const int rows = p.nodes * p.heads, chunks = (kRows - rows) * 8;
    for (int i = thread; i < kBoxes * chunks; i += kComputeThreads) {
      reinterpret_cast<uint4*>(s.query[i / chunks] + rows * 128)[i % chunks] = make_uint4(0, 0, 0, 0);
    }
    sm90::fence_writes();
  }
  if (!kCluster) {
    start_run<false>(p, s.needed, &s.run);
    if (thread == 0) next_segment(p, &s.run, &s.segments[0]);
  }
  __syncthreads();
  if (warp < kWarps) {
    if constexpr (!Own::kBf16) {
      sm90::take_registers<240>();
      list_split_tiles(p, s.run, warp, kWarps, thread % 32);  // nothing else can be done until rows have been widened
    }
    attend_rows<kRows, kCluster>(p, s, thread);
    if (kCluster) combine_cluster<kWarps>(p, s.segments[0], reinterpret_cast<const Left*>(s.latents), thread);
  } else if constexpr (!Own::kBf16) {
    sm90::give_registers<128>();
    widen_whole_tiles(p, s, &query_map, warp - kWarps, thread % 32);
  } else if (thread == kComputeThreads) {
    load_latents<kCluster>(p, s, &query_map, &cache_map);
  } else if (thread == kComputeThreads + 32) {
    load_rotary<kCluster>(p, s, &cache_map);
  } else if (!kCluster && thread == kComputeThreads + 64) {
    plan_segments(p, s);
  } else if (!kCluster && warp == kThreads<Cache> / 32 - 1) {
    list_split_tiles(p, s.run, 0, 1, thread % 32);
  }
#else
  __trap();  // built for another architecture than the card's
#endif
}

template <int kRows, bool kCluster, typename Cache>
int launch(const Problem& p, int blocks, int size, cudaStream_t stream) {
  using Own = Shared<kRows, Cache>;
  static_assert(sizeof(Own) <= 227 * 1024, "what a block may have");
  static_assert(sizeof(Left) <= sizeof(Own::latents), "a cluster's block leaves its output in their place");
  CUtensorMap query_map, cache_map{};
  if (!encode_query(p, p.nodes * p.heads, 1, &query_map) ||
      (Own::kBf16 && !encode_cache(p, kHopperStep, 1, &cache_map))) {
    return ddtree::refused();
  }
  return launch_clusters(attend_few<kRows, kCluster, Cache>, kThreads<Cache>, sizeof(Own), blocks, size, stream, p,
                         query_map, cache_map);
}

template <int kRows>
int launch_rows(const Problem& p, int blocks, int size, cudaStream_t stream) {
  if (p.e4m3) return launch<kRows, false, uint8_t>(p, blocks, 1, stream);
  return size > 0 ? launch<kRows, true, __nv_bfloat16>(p, blocks, size, stream)
                  : launch<kRows, false, __nv_bfloat16>(p, blocks, 1, stream);
}

}  // namespace
}  // namespace hopper_few

int attend_few_hopper(const Problem& p, int blocks, int size, cudaStream_t stream) {
  return p.nodes * p.heads <= 16 ? hopper_few::launch_rows<16>(p, blocks, size, stream)
                                 : hopper_few::launch_rows<32>(p, blocks, size, stream);
}

}  // namespace ddtree
