// What the bfloat16 kernels of verify_attn have in common: their problem, masks and arithmetic. Who does what is in
// verify_plan.h.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/ddtree.h"

namespace ddtree {

constexpr int kTileRows = 64;  // query rows of a block
constexpr int kNodeBits = 32;

struct CutTiles;

struct Problem {
  const __nv_bfloat16* query;
  const void* cache;  // bfloat16 or e4m3
  const uint32_t* ancestors;
  const int32_t* lengths;
  const int32_t* num_nodes;
  const int32_t* layer;
  __nv_bfloat16* out;
  uint8_t* parts;  // what blocks leave for the merge
  CutTiles* cut_tiles;
  int layers, batch, rows, nodes, heads, words;
  int step_rows;  // cache rows of a step
  bool e4m3;      // whether that is what the cache holds
  float log2_scale;  // of the scores, for powers of two
  const float* cache_scale;  // of each layer's e4m3 numbers; null for 1
};

// The call's layer, brought among those that there are.
__device__ __forceinline__ int layer_of(const int32_t* layer, int layers) { return min(max(*layer, 0), layers - 1); }

// What an e4m3 cache's numbers of this call's layer stand for, times themselves.
__device__ __forceinline__ float layer_scale(const float* cache_scale, const int32_t* layer, int layers) {
  return cache_scale == nullptr ? 1.0f : cache_scale[layer_of(layer, layers)];
}

// Of an e4m3 cache: what multiplies scores, then the output.
struct Scales {
  float score, value;
};

__device__ __forceinline__ Scales scales_of(const Problem& p) {
  const float scale = layer_scale(p.cache_scale, p.layer, p.layers);
  return {p.log2_scale * scale, scale};
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

// The sm_90a kernels: 64 cache rows a step; `p.step_rows` must be that. With a `size` they run in clusters of so many
// blocks for each tile, and are done with it (verify_cluster.h); with 0 in `blocks` blocks, and leave parts to merge.
constexpr int kHopperStep = 64;
int attend_hopper(const Problem& p, int blocks, int size, cudaStream_t stream);

// Whether this device runs the kernels' own sm_90a code. If not, since the driver compiled another architecture's PTX,
// they are traps: call nothing else here.
bool hopper_built(int device);

// The size to take, 0 for e4m3. It looks at nothing but shapes, the cache's dtype and the card.
int hopper_cluster(const Problem& p, int device, int processors);

// What attend_hopper calls where a request has at most kFewRows query rows.
constexpr int kFewRows = 32;
int attend_few_hopper(const Problem& p, int blocks, int size, cudaStream_t stream);

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_H_
