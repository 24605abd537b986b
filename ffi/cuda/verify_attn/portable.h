// verify_attn in bfloat16 on sm_80 and up.
//
// Problem: a tile of 64 rows (node and head, heads fastest) over a request's cache, 32 cache rows per step, so that one
// read of the cache serves 64 rows.
//
// Bound. A block has 99 KB of shared memory on sm_120, and two stages of 32 rows take 72 KB of it. Query and output
// must live in registers: 64 x 576 bfloat16 and 64 x 512 floats, 200 KB of a block's 256.
//
// Schedule. Eight warps are two groups of 32 rows by four that share a row's elements: of every 64 elements, warp
// `part` has 16. It holds the group's query for its elements and the output for its columns. Scores of a step are sums
// over the four warps: each warp owns eight rows, receives the others' parts of their scores through shared memory,
// does their softmax, and gives the weights back as the fragments that the second matmul takes. Each warp has the
// group's rows in an order of its own, those that it owns first: who sends what to whom is then the same code for all.
// From sm_90 on rows come by TMA and the last warp to leave a stage asks for its next rows, so no barrier of the whole
// block is left in a step (portable_rows.h).
//
// An e4m3 cache is upcast to bfloat16, exactly, on its way: a step's bytes land behind one stage, two steps ahead, and
// are spread into it before the first matmul. From there on it is the same kernel; the layer's scale multiplies the
// scores and the output.
//
// Result. On an H200 8 requests of 8,192 tokens, 64 heads and 17 nodes take 478 us, 325 TFLOP/s; over e4m3 733 us.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PORTABLE_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PORTABLE_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <stdint.h>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/ptx.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/portable_rows.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/cuda/verify_attn/tensor_map.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace portable {

constexpr int kWarps = kThreads / 32;
constexpr int kGroupRows = 32;  // of four warps
constexpr int kParts = 4;       // warps that share a group's rows
constexpr int kKSteps = DDTREE_ROW_DIM / 64;     // 16-element slices of a warp in the first matmul
constexpr int kColumns = DDTREE_LATENT_DIM / 64;  // 16-column slices of a warp in the second
constexpr int kKeysAhead = 3;    // fragments of cache rows that are on their way to the first matmul
constexpr int kValuesAhead = 4;  // to the second
constexpr int kExchange = 1024;  // bytes of scores that a warp sends to another
constexpr int kExchangeOffset = kStages * kStageBytes;
constexpr int kFactorOffset = kExchangeOffset + kWarps * (kParts - 1) * kExchange;
constexpr int kMaximumOffset = kFactorOffset + kTileRows * 4;
constexpr int kSumOffset = kMaximumOffset + kTileRows * 4;

// A segment, and where its request's rows are: kept in shared memory since registers are what a thread lacks.
struct SegmentAndRows : Segment {
  const void* cache;
  int plane;  // in the cache's map
  // A block numbers its steps through all segments, so that the number tells a stage and the phase of its barriers:
  // the segment's first one, the one after its last, and the first that meets the tree.
  int first, end, first_masked;
  // The first cache row of a step.
  __device__ __forceinline__ int row_of(int number) const { return (step + number - first) * kStep; }
};

// What lies behind the arrays of a block's shared memory.
struct Control {
  SegmentAndRows segment;
  Run run;
  int needed[kTries];
  Scales scales;
  // From sm_90 on, barriers of each stage: its rows have arrived; all warps have left it.
  uint64_t arrived[kStages], left[kStages];
};

constexpr int kControlOffset = kSumOffset + kThreads * 4;
static_assert(kControlOffset % alignof(Control) == 0, "where it lies");
constexpr int kSharedBytes = kControlOffset + sizeof(Control);
static_assert(kSharedBytes <= 99 * 1024, "the smallest opt-in limit among sm_80 and later");

__device__ __forceinline__ Control& control_of(uint8_t* shared) {
  return *reinterpret_cast<Control*>(shared + kControlOffset);
}
__device__ __forceinline__ void group_barrier(uint32_t group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kParts * 32) : "memory");
}

// Where a thread stands in its block. Made anew for each phase of a step from an index that the compiler cannot see
// through: addresses that it kept across phases would not fit in the registers.
struct Place {
  uint32_t warp, lane, group, part;
  __device__ __forceinline__ explicit Place(uint32_t thread) {
    asm volatile("" : "+r"(thread));
    warp = thread / 32;
    lane = thread % 32;
    group = warp / kParts;
    part = warp % kParts;
  }
  // What the warp that owns rows 8 * owner .. of the group gets from its partners; then its weights.
  __device__ __forceinline__ uint8_t* exchange(uint8_t* shared, uint32_t owner) const {
    return shared + kExchangeOffset + (group * kParts + owner) * ((kParts - 1) * kExchange);
  }
  // The greatest score so far of the row that this lane's quad owns, and this lane's share of the sum of its weights.
  __device__ __forceinline__ float* maximum(uint8_t* shared) const {
    return reinterpret_cast<float*>(shared + kMaximumOffset) + warp * 8 + lane / 4;
  }
  __device__ __forceinline__ float* sum(uint8_t* shared) const {
    return reinterpret_cast<float*>(shared + kSumOffset) + warp * 32 + lane;
  }
  // By what the rows of the group scale their output.
  __device__ __forceinline__ float* factors(uint8_t* shared) const {
    return reinterpret_cast<float*>(shared + kFactorOffset) + group * kGroupRows;
  }
};

// The warp whose eight rows this warp keeps as slice `slice`; slice 0 is its own.
__device__ __forceinline__ uint32_t owner_of(Place me, int slice) { return (me.part + slice) % kParts; }

// Gives the owners of rows this warp's part of their scores of 16 cache rows, lane by lane, and keeps its own.
__device__ __forceinline__ void send_scores(uint8_t* shared, Place me, int half, const float (&score)[2][2][4],
                                            float (&own)[4][2]) {
#pragma unroll
  for (int slice = 0; slice < kParts; ++slice) {
    uint8_t* to = me.exchange(shared, owner_of(me, slice)) + (slice - 1) * kExchange + me.lane * 8;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float x = score[slice / 2][t][slice % 2 * 2], y = score[slice / 2][t][slice % 2 * 2 + 1];
      if (slice == 0) {
        own[half * 2 + t][0] = x;
        own[half * 2 + t][1] = y;
      } else {
        *reinterpret_cast<float2*>(to + (half * 2 + t) * 256) = make_float2(x, y);
      }
    }
  }
}

// The first matmul of a step, 16 cache rows at a time: half of the sums at a time leaves registers for fragments
// on their way. A warp sums over its own elements and shares out the sums; in `own` it has those of the row that this
// lane's quad owns: own[t] are of cache rows 8 t + 2 (lane % 4) and the next.
__device__ __forceinline__ void score_step(uint8_t* shared, uint32_t stage, const uint32_t (&query)[2][kKSteps][4],
                                           Place me, float (&own)[4][2]) {
  const uint32_t row = me.lane % 8 + me.lane / 16 * 8;
  const uint32_t keys = stage + row * 128 + (((me.part * 2 + me.lane / 8 % 2) ^ row % 8) << 4);
  uint32_t key[kKeysAhead][4];
  const auto fetch = [&](int i) {
    load_matrices(key[i % kKeysAhead], keys + i % kKSteps * kSlice + i / kKSteps * kHalfStep);
  };
#pragma unroll
  for (int i = 0; i < kKeysAhead; ++i) fetch(i);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float score[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kKSteps; ++k) {
      const int i = half * kKSteps + k;
      const uint32_t(&b)[4] = key[i % kKeysAhead];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply(score[m][0], query[m][k], b[0], b[1]);
        multiply(score[m][1], query[m][k], b[2], b[3]);
      }
      if (i + kKeysAhead < 2 * kKSteps) fetch(i + kKeysAhead);
    }
    send_scores(shared, me, half, score, own);
  }
}

// The softmax of a step: completes the scores of the row that this lane's quad owns, and leaves their weights, laid out
// as the second matmul takes them, and by what the row's output so far shrinks.
template <typename Cache>
__device__ __forceinline__ void weigh_step(const Problem& p, uint8_t* shared, const SegmentAndRows& segment,
                                           int number, bool masked, Place me, float (&own)[4][2]) {
  uint8_t* from = me.exchange(shared, me.part);
#pragma unroll
  for (int other = 0; other < kParts - 1; ++other) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float2 x = *reinterpret_cast<const float2*>(from + other * kExchange + t * 256 + me.lane * 8);
      own[t][0] += x.x;
      own[t][1] += x.y;
    }
  }
  const float log2_scale = sizeof(Cache) == 1 ? control_of(shared).scales.score : p.log2_scale;
  if (masked) {
    const int row = segment.tile * kTileRows + static_cast<int>(me.warp * 8 + me.lane / 4);
    const int node = min(row / p.heads, segment.nodes - 1);
    const uint32_t seen = visible(p.ancestors + (static_cast<int64_t>(segment.request) * p.nodes + node) * p.words,
                                  p.words, segment.row_of(number) - segment.length, segment.nodes) >>
                          me.lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = fabsf(own[t][e]) <= FLT_MAX ? own[t][e] * log2_scale : NAN;
        own[t][e] = seen >> (t * 8 + e) & 1 ? x : -INFINITY;
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      own[t][0] *= log2_scale;
      own[t][1] *= log2_scale;
    }
  }
  const float maximum = *me.maximum(shared);
  float top = maximum;
#pragma unroll
  for (int t = 0; t < 4; ++t) top = fmaxf(top, fmaxf(own[t][0], own[t][1]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float factor = top == maximum ? 1.0f : power_of_two(maximum - top);
  const float shift = top == -INFINITY ? 0.0f : top;  // nothing seen so far
  float sum = *me.sum(shared) * factor;
  uint32_t weights[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float x = power_of_two(own[t][0] - shift), y = power_of_two(own[t][1] - shift);
    sum += x + y;
    weights[t] = pack(x, y);
  }
  __syncwarp();  // all lanes have read what this overwrites
#pragma unroll
  for (int t = 0; t < 4; ++t) *reinterpret_cast<uint32_t*>(from + t * 128 + me.lane * 4) = weights[t];
  *me.sum(shared) = sum;
  if (me.lane % 4 == 0) {
    *me.maximum(shared) = top;
    me.factors(shared)[me.part * 8 + me.lane / 4] = factor;
  }
}

// `first` is the number of the segment's first step.
template <typename Cache>
inline __device__ void next_segment_and_rows(const Problem& p, Run* run, SegmentAndRows* s, int first) {
  next_segment(p, run, s);
  s->first = first;
  s->end = first + s->end_step - s->step;
  s->first_masked = first + s->length / kStep - s->step;
  s->plane = layer_of(p.layer, p.layers) * p.batch + s->request;
  s->cache = static_cast<const Cache*>(p.cache) + static_cast<int64_t>(s->plane) * p.rows * DDTREE_ROW_DIM;
}

template <typename Cache>
__global__ void __launch_bounds__(kThreads, 1) attend(const Problem p, const __grid_constant__ CUtensorMap map) {
  constexpr bool kE4m3 = sizeof(Cache) == 1;
  constexpr int kAhead = kE4m3 || kBoxes<Cache> ? 2 : 1;  // steps that are asked for before the first one is used
  extern __shared__ __align__(1024) uint8_t shared[];
  Control& control = control_of(shared);
  SegmentAndRows& segment = control.segment;
  Run& run = control.run;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t thread = threadIdx.x;

  if (kBoxes<Cache> && thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      sm90::init_barrier(&control.arrived[i], 1);
      sm90::init_barrier(&control.left[i], kWarps);
    }
    sm90::fence_barrier_init();
  }
  start_run<true>(p, control.needed, &run);
  __syncthreads();
  if (thread == 0) {
    next_segment_and_rows<Cache>(p, &run, &segment, 0);
    if constexpr (kE4m3) control.scales = scales_of(p);
  }
  if (thread / 32 == kWarps - 1) list_split_tiles(p, run, 0, 1, thread % 32);
  __syncthreads();

  while (segment.request < p.batch) {
    // Asks for a step's rows: one thread, or all.
    const auto ask = [&](int number) {
      uint8_t* to = shared + landing_of<Cache>(number);
      const Cache* cache = static_cast<const Cache*>(segment.cache);
      const int first = segment.row_of(number), end = segment.length + segment.nodes;
      if constexpr (kBoxes<Cache>) {
        bring_step(to, &control.arrived[number % kStages], &map, first, segment.plane);
      } else {
        const Place me(thread);
        copy_step(shared_address(to), cache, first, end, me.warp, me.lane);
      }
    };
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int number = segment.first + ahead;
      if ((!kBoxes<Cache> || thread == 0) && (ahead == 0 || number < segment.end)) ask(number);
      if constexpr (!kBoxes<Cache>) commit_copies();
    }

    uint32_t query[2][kKSteps][4];
    {
      const Place me(thread);
      const int first_row = segment.tile * kTileRows + static_cast<int>(me.group * kGroupRows + me.lane / 4);
      const int real_rows = segment.nodes * p.heads;
      const __nv_bfloat16* queries =
          p.query + static_cast<int64_t>(segment.request) * p.nodes * p.heads * DDTREE_ROW_DIM + me.part * 16 +
          me.lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + static_cast<int>(owner_of(me, m * 2 + half)) * 8;
          const __nv_bfloat16* from = queries + static_cast<int64_t>(min(row, real_rows - 1)) * DDTREE_ROW_DIM;
#pragma unroll
          for (int k = 0; k < kKSteps; ++k) {
            query[m][k][half] = row < real_rows ? *reinterpret_cast<const uint32_t*>(from + k * 64) : 0;
            query[m][k][half + 2] = row < real_rows ? *reinterpret_cast<const uint32_t*>(from + k * 64 + 8) : 0;
          }
        }
      }
    }
    float out[2][kColumns][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[m][k][t][e] = 0;
    {
      const Place me(thread);
      *me.sum(shared) = 0;
      if (me.lane % 4 == 0) *me.maximum(shared) = -INFINITY;
    }

    for (int number = segment.first; number < segment.end; ++number) {
      if constexpr (kBoxes<Cache>) {
        group_barrier(thread / (kParts * 32));  // the partners have read the weights of the step before
        sm90::wait(&control.arrived[number % kStages], static_cast<uint32_t>(number) / kStages % 2);
      } else {
        wait_copies<kAhead - 1>();
        __syncthreads();
      }
      uint32_t stage = base + landing_of<Cache>(number);
      if constexpr (kE4m3) {
        const Place me(thread);
        widen_step(shared + (stage - base), shared, me.warp, me.lane);
        __syncthreads();
        stage = base;
      }

      float own[4][2];
      score_step(shared, stage, query, Place(thread), own);
      if constexpr (!kBoxes<Cache>) {
        // Not before the first matmul: its reads of shared memory would queue behind these copies.
        if (number + kAhead < segment.end) ask(number + kAhead);
        commit_copies();
      }
      const bool masked = number >= segment.first_masked;
      if (masked) {
        __syncthreads();
        clear_not_finite(shared + (stage - base), thread);
        __syncthreads();
      } else {
        group_barrier(thread / (kParts * 32));
      }
      weigh_step<Cache>(p, shared, segment, number, masked, Place(thread), own);
      group_barrier(thread / (kParts * 32));

      const Place me(thread);
      const uint32_t row = me.lane % 16;
      const uint32_t values = stage + row * 128 + (((me.part * 2 + me.lane / 16) ^ row % 8) << 4);
      uint32_t weight[2][2][4], value[kValuesAhead][4];
      const auto fetch_weights = [&](int half) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint8_t* from = me.exchange(shared, owner_of(me, m * 2 + static_cast<int>(me.lane / 8 % 2)));
          load_matrices(weight[half][m],
                        shared_address(from) + (half * 2 + me.lane / 16) * 128 + me.lane % 8 * 16);
        }
      };
      const auto fetch = [&](int i) {
        load_matrices_transposed(value[i % kValuesAhead],
                                 values + i / kColumns * kHalfStep + i % kColumns * kSlice);
      };
      fetch_weights(0);
#pragma unroll
      for (int i = 0; i < kValuesAhead; ++i) fetch(i);
      // Only now, so that nothing above waits until it is known whether the output shrinks.
      const float* factors = me.factors(shared) + me.lane / 4;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float f0 = factors[owner_of(me, m * 2) * 8], f1 = factors[owner_of(me, m * 2 + 1) * 8];
        if (__any_sync(~0u, f0 != 1.0f || f1 != 1.0f)) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              out[m][k][t][0] *= f0;
              out[m][k][t][1] *= f0;
              out[m][k][t][2] *= f1;
              out[m][k][t][3] *= f1;
            }
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        const int half = i / kColumns, k = i % kColumns;
        const uint32_t(&b)[4] = value[i % kValuesAhead];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply(out[m][k][0], weight[half][m], b[0], b[1]);
          multiply(out[m][k][1], weight[half][m], b[2], b[3]);
        }
        if (i + kValuesAhead < 2 * kColumns) fetch(i + kValuesAhead);
        if (i + kValuesAhead == kColumns) fetch_weights(1);
      }
      if constexpr (kBoxes<Cache>) {
        // The last warp to leave a stage asks for the rows that come to it next: nobody waits for the others.
        __syncwarp();
        if (thread % 32 == 0 && sm90::arrive_last(&control.left[number % kStages]) && number + kStages < segment.end) {
          ask(number + kStages);
        }
      }
    }

    const Place me(thread);
    float sum = *me.sum(shared);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    __syncthreads();  // the stages and the factors are free
    if (segment.step == 0 && segment.end_step == segment.steps) {
      const float scale = kE4m3 ? control.scales.value : 1.0f;
      if (me.lane % 4 == 0) me.factors(shared)[me.part * 8 + me.lane / 4] = scale / sum;
      group_barrier(thread / (kParts * 32));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t group_row = owner_of(me, m * 2 + half) * 8 + me.lane / 4;
          const int row = segment.tile * kTileRows + static_cast<int>(me.group * kGroupRows + group_row);
          const float f = me.factors(shared)[group_row];
          if (row < segment.nodes * p.heads) {
            __nv_bfloat16* to =
                p.out + (static_cast<int64_t>(segment.request) * p.nodes * p.heads + row) * DDTREE_LATENT_DIM +
                me.part * 16 + me.lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < kColumns; ++k)
#pragma unroll
              for (int t = 0; t < 2; ++t) {
                *reinterpret_cast<uint32_t*>(to + k * 64 + t * 8) =
                    pack(out[m][k][t][half * 2] * f, out[m][k][t][half * 2 + 1] * f);
              }
          }
        }
      }
    } else {
      float* split_out = reinterpret_cast<float*>(split_of<float>(p, blockIdx.x, segment.split));
      if (me.lane % 4 == 0) {
        reinterpret_cast<float4*>(split_out + kTileRows * DDTREE_LATENT_DIM)[me.warp * 8 + me.lane / 4] =
            make_float4(*me.maximum(shared), sum, 1.0f, 1.0f);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t row = me.group * kGroupRows + owner_of(me, m * 2 + half) * 8 + me.lane / 4;
          float* to = split_out + row * DDTREE_LATENT_DIM + me.part * 16 + me.lane % 4 * 2;
#pragma unroll
          for (int k = 0; k < kColumns; ++k)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              *reinterpret_cast<float2*>(to + k * 64 + t * 8) =
                  make_float2(out[m][k][t][half * 2], out[m][k][t][half * 2 + 1]);
            }
        }
    }
    __syncthreads();
    if (thread == 0) next_segment_and_rows<Cache>(p, &run, &segment, segment.end);
    __syncthreads();
  }
}

template <typename Cache>
int launch(const Problem& p, int blocks, const CUtensorMap& map, cudaStream_t stream) {
  const auto kernel = attend<Cache>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) {
    return refused();
  }
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(p, map);
  return launch_status();
}

}  // namespace portable

// `p.step_rows` must be portable::kStep. Leaves splits in float32 to launch_combine.
inline int attend_portable(const Problem& p, int blocks, int major, cudaStream_t stream) {
  if (p.e4m3) return portable::launch<uint8_t>(p, blocks, {}, stream);
  CUtensorMap map{};
  // Code for sm_90 and later takes it.
  if (major >= 9 &&
      !encode_cache(p, portable::kStep, DDTREE_ROW_DIM / 64, &map, CU_TENSOR_MAP_L2_PROMOTION_L2_256B)) {
    return refused();
  }
  return portable::launch<__nv_bfloat16>(p, blocks, map, stream);
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PORTABLE_H_
