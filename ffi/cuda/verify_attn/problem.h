// What verify_attn's bfloat16 kernels are given.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PROBLEM_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PROBLEM_H_

#include <cuda_bf16.h>
#include <stdint.h>

namespace ddtree {

constexpr int kTileRows = 64;  // query rows of a block
constexpr int kNodeBits = 32;
constexpr int kHopperStep = 64;  // cache rows of a step of the Hopper kernels
constexpr int kFewRows = 32;     // query rows of a request up to which Hopper has a kernel of its own

struct SplitTiles;

struct Problem {
  const __nv_bfloat16* query;
  const void* cache;  // bfloat16 or e4m3
  const uint32_t* ancestors;
  const int32_t* lengths;
  const int32_t* num_nodes;
  const int32_t* layer;
  __nv_bfloat16* out;
  uint8_t* splits;  // what blocks leave for launch_combine
  SplitTiles* split_tiles;
  int layers, batch, rows, nodes, heads, words;
  int step_rows;  // cache rows of a step
  bool e4m3;      // whether that is what the cache holds
  float log2_scale;  // of the scores, for powers of two
  const float* cache_scale;  // of each layer's e4m3 elements; null for 1
};

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PROBLEM_H_
