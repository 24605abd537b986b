// The masks and the arithmetic that verify_attn's kernels share.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_ARITHMETIC_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_ARITHMETIC_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/cuda/verify_attn/problem.h"

namespace ddtree {

// The call's layer, brought among those that there are.
__device__ __forceinline__ int layer_of(const int32_t* layer, int layers) { return min(max(*layer, 0), layers - 1); }

// What an e4m3 cache's elements of this call's layer stand for, times themselves.
__device__ __forceinline__ float layer_scale(const float* cache_scale, const int32_t* layer, int layers) {
  return cache_scale == nullptr ? 1.0f : cache_scale[layer_of(layer, layers)];
}

// Of an e4m3 cache: what multiplies scores, then the output.
struct Scales {
  float score, value;
};

__device__ __forceinline__ Scales scales_of(const Problem& p) {
  const float scale = layer_scale(p.cache_scale, p.layer, p.layers);
  return {.score = p.log2_scale * scale, .value = scale};
}

// 2^x: 0 for -inf, NaN for NaN.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to an ulp, without a call.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

__device__ __forceinline__ uint4 finite(uint4 x) {
  return make_uint4(finite(x.x), finite(x.y), finite(x.z), finite(x.w));
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

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_ARITHMETIC_H_
