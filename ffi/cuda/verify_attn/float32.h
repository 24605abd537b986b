// verify_attn in float32, on any architecture.
//
// Problem: the contract of ddtree.h in float32, for tests and for models that decode in it.
//
// Schedule. A block per (node, head) row. Its warps take cache rows in turn, 128 at a time, one dot product of 576
// elements each; an online softmax; then each thread adds up two of the 512 output columns. Nothing is shared between
// rows, so a request's cache is read once per row.
//
// Result: right, not fast. Use bfloat16 where time matters.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_FLOAT32_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_FLOAT32_H_

#include <cuda_runtime.h>
#include <float.h>
#include <stdint.h>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"
#include "ffi/e4m3.h"

namespace ddtree {
namespace float32 {

constexpr int kChunk = 128;  // cache rows of a step
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

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

template <typename Cache>
void launch(const ddtree_verify_attn_args& a, cudaStream_t stream) {
  const int nodes = static_cast<int>(a.nodes), words = (nodes + kNodeBits - 1) / kNodeBits;
  attend_f32<Cache><<<static_cast<unsigned>(a.batch * a.nodes * a.heads), kThreads, 0, stream>>>(
      static_cast<const float*>(a.query), static_cast<const Cache*>(a.cache), a.ancestors, a.lengths, a.num_nodes,
      a.layer, static_cast<float*>(a.out), static_cast<int>(a.layers), static_cast<int>(a.batch),
      static_cast<int>(a.rows), nodes, static_cast<int>(a.heads), words, a.scale, a.cache_scale);
}

}  // namespace float32

inline int attend_float32(const ddtree_verify_attn_args& args, cudaStream_t stream) {
  (args.cache_dtype == DDTREE_E4M3 ? float32::launch<uint8_t> : float32::launch<float>)(args, stream);
  return launch_status();
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_FLOAT32_H_
