// Absorbed MLA attention of a tree's rows over the whole prefix and over their ancestors.
//
// bfloat16: a block keeps 64 rows (node and head, heads fastest) and walks the cache 32 rows at a time, so that one
// read of the cache serves them all. Eight warps are two groups of 32 rows by four that share the row's numbers: of
// every 64 numbers, warp `part` has 16. It holds the group's query for its numbers and the output for its columns in
// registers, the only place with room for them beside two 32-row stages in 99 KB of shared memory. Scores of a step
// are sums over the four warps: each warp owns eight rows, receives the others' parts of them through shared memory,
// does their softmax, and gives the weights back as the fragments that the second product takes. Each warp has the
// group's rows in an order of its own, those that it owns first: who sends what to whom is then the same code for all.
//
// An e4m3 cache is widened to bfloat16, exactly, on its way: a step's bytes land behind one stage, two steps ahead, and
// are spread into it before the first product. From there on it is the same kernel; the layer's scale multiplies the
// scores and the output.
//
// float32: plain arithmetic, a block for each row.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <stddef.h>
#include <stdint.h>

#include <algorithm>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/ptx.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/tensor_map.h"
#include "ffi/cuda/verify_attn.h"
#include "ffi/cuda/verify_merge.h"
#include "ffi/cuda/verify_plan.h"
#include "ffi/cuda/verify_rows.h"
#include "ffi/ddtree.h"
#include "ffi/e4m3.h"

namespace {

using namespace ddtree;            // NOLINT: what the kernels share
using namespace ddtree::portable;  // NOLINT

constexpr int kWarps = kThreads / 32;
constexpr int kGroupRows = 32;  // of four warps
constexpr int kParts = 4;       // warps that share a group's rows
constexpr int kKSteps = DDTREE_ROW_DIM / 64;     // 16-number slices of a warp in the first product
constexpr int kColumns = DDTREE_LATENT_DIM / 64;  // 16-column slices of a warp in the second
constexpr int kKeysAhead = 3;    // fragments of cache rows that are on their way to the first product
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

constexpr int kMaxBlocks = 256;  // of the persistent grid
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

// The first product of a step, 16 cache rows at a time: half of the sums at a time leaves registers for fragments
// on their way. A warp sums over its own numbers and shares out the sums; in `own` it has those of the row that this
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
// as the second product takes them, and by what the row's output so far shrinks.
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
__device__ void next_segment_and_rows(const Problem& p, Run* run, SegmentAndRows* s, int first) {
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
  if (thread / 32 == kWarps - 1) list_cut_tiles(p, run, 0, 1, thread % 32);
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
        // Not before the first product: its reads of shared memory would queue behind these copies.
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
      float* part_out = reinterpret_cast<float*>(part_of<float>(p, blockIdx.x, segment.part));
      if (me.lane % 4 == 0) {
        reinterpret_cast<float4*>(part_out + kTileRows * DDTREE_LATENT_DIM)[me.warp * 8 + me.lane / 4] =
            make_float4(*me.maximum(shared), sum, 1.0f, 1.0f);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t row = me.group * kGroupRows + owner_of(me, m * 2 + half) * 8 + me.lane / 4;
          float* to = part_out + row * DDTREE_LATENT_DIM + me.part * 16 + me.lane % 4 * 2;
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

constexpr int kChunk = 128;  // cache rows of a step in float32

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(uint8_t x) { return FromE4m3(x); }

template <typename Cache>
__global__ void __launch_bounds__(kThreads) attend_f32(const float* query, const Cache* all_cache,
                                                       const uint32_t* ancestors, const int32_t* lengths,
                                                       const int32_t* num_nodes, const int32_t* all_layer, float* out,
                                                       int layers, int batch, int rows, int nodes, int heads, int words,
                                                       float scale, const float* cache_scale) {
  __shared__ float weights[kChunk];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index = blockIdx.x;
  const int node = static_cast<int>(index / heads % nodes), b = static_cast<int>(index / heads / nodes);
  const int length = min(max(lengths[b], 0), rows - nodes), real = min(max(num_nodes[b], 0), nodes);
  const int layer = layer_of(all_layer, layers);
  float value_scale = 1.0f;
  if constexpr (sizeof(Cache) == 1) {
    value_scale = layer_scale(cache_scale, all_layer, layers);
    scale *= value_scale;
  }
  const Cache* cache = all_cache + (static_cast<int64_t>(layer) * batch + b) * rows * DDTREE_ROW_DIM;
  out += index * DDTREE_LATENT_DIM;
  if (node >= real) {
    for (int c = threadIdx.x; c < DDTREE_LATENT_DIM; c += kThreads) {
      out[c] = widened(cache[static_cast<int64_t>(length + node) * DDTREE_ROW_DIM + c]) * value_scale;
    }
    return;
  }
  const uint32_t* seen = ancestors + (static_cast<int64_t>(b) * nodes + node) * words;
  float q[DDTREE_ROW_DIM / 32];
#pragma unroll
  for (int c = 0; c < DDTREE_ROW_DIM / 32; ++c) q[c] = query[index * DDTREE_ROW_DIM + c * 32 + lane];
  float maximum = -INFINITY, sum = 0, total[2] = {};
  for (int first = 0; first < length + real; first += kChunk) {
    for (int i = warp; i < kChunk; i += kWarps) {
      const int j = first + i - length;
      float x = -INFINITY;
      if (j < 0 || (j < real && (seen[j / kNodeBits] >> (j % kNodeBits) & 1))) {
        const Cache* key = cache + static_cast<int64_t>(first + i) * DDTREE_ROW_DIM;
        x = 0;
#pragma unroll
        for (int c = 0; c < DDTREE_ROW_DIM / 32; ++c) x = fmaf(q[c], widened(key[c * 32 + lane]), x);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
        x = fabsf(x) <= FLT_MAX ? x * scale : NAN;
      }
      if (lane == 0) weights[i] = x;
    }
    __syncthreads();
    float top = maximum;
    for (int i = lane; i < kChunk; i += 32) top = fmaxf(top, weights[i]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float factor = top == maximum ? 1.0f : expf(maximum - top);
    const float shift = top == -INFINITY ? 0.0f : top;
    maximum = top;
    sum *= factor;
    total[0] *= factor;
    total[1] *= factor;
    for (int i = 0; i < kChunk; ++i) {
      const float score = weights[i];
      if (score == -INFINITY) continue;  // not seen
      const float weight = expf(score - shift);
      const Cache* value = cache + static_cast<int64_t>(first + i) * DDTREE_ROW_DIM;
      sum += weight;
      total[0] = fmaf(weight, widened(value[threadIdx.x]), total[0]);
      total[1] = fmaf(weight, widened(value[threadIdx.x + kThreads]), total[1]);
    }
    __syncthreads();
  }
  out[threadIdx.x] = total[0] / sum * value_scale;
  out[threadIdx.x + kThreads] = total[1] / sum * value_scale;
}

int64_t max_steps(int64_t batch, int64_t rows, int64_t nodes, int64_t heads) {
  return batch * ddtree::ceil_div(nodes * heads, kTileRows) * ddtree::ceil_div(rows, kStep);
}

int64_t max_blocks(int64_t batch, int64_t rows, int64_t nodes, int64_t heads) {
  return std::min<int64_t>(ddtree::ceil_div(max_steps(batch, rows, nodes, heads), kMinRun), kMaxBlocks);
}

// Of the workspace, in which the list of cut tiles follows.
size_t parts_bytes(int64_t batch, int64_t rows, int64_t nodes, int64_t heads) {
  return static_cast<size_t>(kBlockParts * max_blocks(batch, rows, nodes, heads)) * kPartBytes<float>;
}

// Whether the kernels serve these sizes in some number of layers: what they count in 32 bits must fit.
bool served(int64_t batch, int64_t rows, int64_t nodes, int64_t heads, int32_t dtype) {
  const int64_t bytes = ddtree::DtypeBytes(dtype);
  return ddtree::VerifyAttnSizes(rows, nodes, heads) && ddtree::Between(0, batch, INT32_MAX) &&
         rows <= INT32_MAX - kChunk && ddtree::ProductWithin(INT32_MAX - kTileRows, {nodes, heads}) &&
         ddtree::ProductWithin(INT32_MAX, {nodes, heads, batch}) &&
         ddtree::ArrayBytes(bytes, {batch, rows, DDTREE_ROW_DIM}) &&
         max_steps(batch, rows, nodes, heads) <= kMostSteps - kBeginCost * batch;
}

}  // namespace

size_t ddtree_verify_attn_workspace(int64_t batch, int64_t rows, int64_t nodes, int64_t heads, int32_t dtype) {
  if (dtype != DDTREE_BF16 || batch == 0 || !served(batch, rows, nodes, heads, dtype)) return 0;
  // What the end of each block's run cuts, and all tiles where requests are cut into chunks.
  const int64_t tiles = max_blocks(batch, rows, nodes, heads) + batch * ddtree::ceil_div(nodes * heads, kTileRows);
  return parts_bytes(batch, rows, nodes, heads) + offsetof(CutTiles, tiles) + tiles * sizeof(CutTile);
}

int ddtree_verify_attn_cuda(const ddtree_verify_attn_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  // A plane of the cache, a layer's request, is a 32-bit index.
  if (!ddtree::ProductWithin(INT32_MAX, {args->layers, args->batch}) ||
      !served(args->batch, args->rows, args->nodes, args->heads, args->dtype) ||
      !ddtree::aligned({args->query, args->cache, args->out})) {
    return DDTREE_INVALID_ARGUMENT;
  }
  const int64_t all_rows = args->batch * args->nodes * args->heads;
  if (all_rows == 0) return DDTREE_OK;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int layers = static_cast<int>(args->layers), batch = static_cast<int>(args->batch);
  const int rows = static_cast<int>(args->rows), nodes = static_cast<int>(args->nodes);
  const int heads = static_cast<int>(args->heads), words = (nodes + kNodeBits - 1) / kNodeBits;
  const bool e4m3 = args->cache_dtype == DDTREE_E4M3;
  if (args->dtype == DDTREE_F32) {
    const auto launch = [&](auto kernel, auto* cache) {
      kernel<<<static_cast<int>(all_rows), kThreads, 0, cuda_stream>>>(
          static_cast<const float*>(args->query), cache, args->ancestors, args->lengths, args->num_nodes, args->layer,
          static_cast<float*>(args->out), layers, batch, rows, nodes, heads, words, args->scale, args->cache_scale);
    };
    if (e4m3) {
      launch(attend_f32<uint8_t>, static_cast<const uint8_t*>(args->cache));
    } else {
      launch(attend_f32<float>, static_cast<const float*>(args->cache));
    }
    return ddtree::launch_status();
  }
  if (!ddtree::has_workspace(args->workspace, args->workspace_bytes,
                             ddtree_verify_attn_workspace(batch, rows, nodes, heads, args->dtype))) {
    return DDTREE_INVALID_ARGUMENT;
  }
  const auto kernel = e4m3 ? attend<uint8_t> : attend<__nv_bfloat16>;
  int device = 0, processors = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) {
    return ddtree::refused();
  }
  const bool has_hopper = major == 9 && minor == 0 && ddtree::hopper_built(device);
  if (args->path == DDTREE_PATH_HOPPER && !has_hopper) return DDTREE_INVALID_ARGUMENT;
  const bool hopper = has_hopper && args->path != DDTREE_PATH_PORTABLE;
  uint8_t* parts = static_cast<uint8_t*>(args->workspace);
  const Problem problem{static_cast<const __nv_bfloat16*>(args->query),
                        args->cache,
                        args->ancestors,
                        args->lengths,
                        args->num_nodes,
                        args->layer,
                        static_cast<__nv_bfloat16*>(args->out),
                        parts,
                        reinterpret_cast<CutTiles*>(parts + parts_bytes(batch, rows, nodes, heads)),
                        layers,
                        batch,
                        rows,
                        nodes,
                        heads,
                        words,
                        hopper ? kHopperStep : kStep,
                        e4m3,
                        args->scale * 1.4426950408889634f,
                        args->cache_scale};
  const int blocks = static_cast<int>(std::min<int64_t>(max_blocks(batch, rows, nodes, heads), processors));
  if (hopper) {
    const int size = hopper_cluster(problem, device, processors);
    const int status = attend_hopper(problem, blocks, size, cuda_stream);
    if (status != DDTREE_OK || size > 0) return status;
    return ddtree::launch_merge<__half>(problem, processors, cuda_stream);
  }
  CUtensorMap map{};
  // Code for sm_90 and later takes it.
  if (major >= 9 && !e4m3 &&
      !ddtree::encode_cache(problem, kStep, DDTREE_ROW_DIM / 64, &map, CU_TENSOR_MAP_L2_PROMOTION_L2_256B)) {
    return ddtree::refused();
  }
  kernel<<<blocks, kThreads, kSharedBytes, cuda_stream>>>(problem, map);
  return ddtree::launch_merge<float>(problem, processors, cuda_stream);
}
