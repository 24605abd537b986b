// How the bfloat16 kernels of verify_attn share out their work, and what they have in common.
//
// The work of a launch is all steps of all 64-row tiles (node and head, heads fastest), one after the other. Every block
// computes from `lengths` and `num_nodes` how many there are and takes an equal run of them, so the grid depends on
// nothing but the shapes. A tile that is cut between blocks leaves parts in the workspace, which a second launch merges.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/ddtree.h"

namespace ddtree {

constexpr int kTileRows = 64;  // query rows of a block
constexpr int kMinRun = 2;     // steps below which another block costs more than it saves
constexpr int kPartFloats = kTileRows * (DDTREE_LATENT_DIM + 2);  // output, then maxima, then sums
constexpr int kNodeBits = 32;

struct Problem {
  const __nv_bfloat16* query;
  const void* cache;  // bfloat16, or e4m3 for the portable kernel
  const uint32_t* ancestors;
  const int32_t* lengths;
  const int32_t* num_nodes;
  const int32_t* layer;
  __nv_bfloat16* out;
  float* parts;
  int layers, batch, rows, nodes, heads, words;
  int step_rows;  // cache rows of a step
  float log2_scale;  // of the scores, for powers of two
  const float* cache_scale;  // of each layer's e4m3 numbers; null for 1
};

struct Request {
  int length;  // rows that every node sees
  int nodes;   // real ones
  int tiles;
  int steps;   // of a tile
};

__device__ __forceinline__ Request request_of(const Problem& p, int b) {
  Request r;
  r.length = min(max(p.lengths[b], 0), p.rows - p.nodes);
  r.nodes = min(max(p.num_nodes[b], 0), p.nodes);
  r.tiles = (r.nodes * p.heads + kTileRows - 1) / kTileRows;
  r.steps = (r.length + r.nodes + p.step_rows - 1) / p.step_rows;
  return r;
}

// Sum of `value` over the lanes up to this one.
__device__ __forceinline__ int64_t prefix_sum(int64_t value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t below = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

// Steps of the requests before `end`; all lanes call it and get the same.
__device__ __forceinline__ int64_t steps_before(const Problem& p, int end, int lane) {
  int64_t sum = 0;
  for (int b = lane; b < end; b += 32) {
    const Request r = request_of(p, b);
    sum += static_cast<int64_t>(r.tiles) * r.steps;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}

// Steps that each of `blocks` takes.
__device__ __forceinline__ int64_t run_length(int64_t total, int blocks) {
  const int64_t run = (total + blocks - 1) / blocks;
  return run < kMinRun ? kMinRun : run;
}

// The request that holds step `at` of all, and the number of steps before it.
__device__ __forceinline__ int find_request(const Problem& p, int64_t at, int lane, int64_t* before) {
  int64_t sum = 0;
  for (int first = 0; first < p.batch; first += 32) {
    int64_t steps = 0;
    if (first + lane < p.batch) {
      const Request r = request_of(p, first + lane);
      steps = static_cast<int64_t>(r.tiles) * r.steps;
    }
    const int64_t end = sum + prefix_sum(steps, lane);
    const unsigned past = __ballot_sync(~0u, end > at);
    if (past != 0) {
      const int found = __ffs(past) - 1;
      *before = __shfl_sync(~0u, end - steps, found);
      return first + found;
    }
    sum = __shfl_sync(~0u, end, 31);
  }
  *before = sum;
  return p.batch;
}

// What a block does next, and how far it is in its run. In shared memory, since registers are what a block lacks.
struct Segment {
  const void* cache;           // of the request
  int64_t at, left, before;    // steps of the launch: next, still to do, and before the request
  int request, tile, step, end_step, steps;
  int length, nodes;
};

// Moves to the next tile of the run; request is `batch` when nothing is left. One thread calls it.
template <typename Cache = __nv_bfloat16>
__device__ __forceinline__ void next_segment(const Problem& p, Segment* s) {
  int b = s->request;
  while (b < p.batch && s->left > 0) {
    const Request r = request_of(p, b);
    const int64_t steps = static_cast<int64_t>(r.tiles) * r.steps, from = s->at - s->before;
    if (from < steps) {
      const int layer = min(max(*p.layer, 0), p.layers - 1);
      s->cache =
          static_cast<const Cache*>(p.cache) + (static_cast<int64_t>(layer) * p.batch + b) * p.rows * DDTREE_ROW_DIM;
      s->request = b;
      s->tile = static_cast<int>(from / r.steps);
      s->step = static_cast<int>(from % r.steps);
      s->end_step = static_cast<int>(min(static_cast<int64_t>(r.steps), s->step + s->left));
      s->steps = r.steps;
      s->length = r.length;
      s->nodes = r.nodes;
      s->at += s->end_step - s->step;
      s->left -= s->end_step - s->step;
      return;
    }
    s->before += steps;
    ++b;
  }
  s->request = p.batch;
}

// 2^x: 0 for -inf, NaN for NaN.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// A pair of bfloat16 with infinities and NaN made zero.
__device__ __forceinline__ uint32_t finite(uint32_t pair) {
  if ((pair & 0x7f80u) == 0x7f80u) pair &= 0xffff0000u;
  if ((pair & 0x7f800000u) == 0x7f800000u) pair &= 0x0000ffffu;
  return pair;
}

// Which of the 32 cache rows from tree row `first` on a node sees; `first` is negative for rows of the prefix.
__device__ __forceinline__ uint32_t visible(const uint32_t* ancestors, int words, int first, int nodes) {
  if (first <= -32) return ~0u;
  if (first >= nodes) return 0;
  uint32_t seen;
  if (first < 0) {
    seen = ancestors[0] << -first | ((1u << -first) - 1);
  } else {
    const int word = first / kNodeBits;
    seen = __funnelshift_r(ancestors[word], word + 1 < words ? ancestors[word + 1] : 0, first % kNodeBits);
  }
  return nodes - first < 32 ? seen & ((1u << (nodes - first)) - 1) : seen;
}

// Where the part of a tile's output, maxima and sums that a block leaves for the merge begins.
__device__ __forceinline__ float* part_of(const Problem& p, int64_t block, bool first_step) {
  return p.parts + (2 * block + first_step) * kPartFloats;
}

// The sm_90a kernel: 64 cache rows a step; `p.step_rows` must be that.
constexpr int kHopperStep = 64;
int attend_hopper(const Problem& p, int blocks, cudaStream_t stream);

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_H_
