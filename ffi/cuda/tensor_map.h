// Maps of bfloat16 rows for TMA, in the layout that sm90.h describes.
#ifndef DDTREE_FFI_CUDA_TENSOR_MAP_H_
#define DDTREE_FFI_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/cuda/verify_attn.h"
#include "ffi/ddtree.h"

namespace ddtree {

using EncodeMap = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without a link to the driver's library: the extension must load where there is none.
inline EncodeMap find_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeMap>(found);
}

// A map of `rows` rows of `planes` planes, cut into boxes of `box_rows` x 64.
inline bool encode_map(EncodeMap encode, const void* data, int64_t rows, int64_t planes, int box_rows,
                       CUtensorMap* map) {
  const cuuint64_t sizes[3] = {DDTREE_ROW_DIM, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[2] = {DDTREE_ROW_DIM * 2, static_cast<cuuint64_t>(rows) * DDTREE_ROW_DIM * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, planes > 0 ? 3 : 2, const_cast<void*>(data), sizes, strides, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The driver's function, or null.
inline EncodeMap encoder() {
  static const EncodeMap encode = find_encoder();
  return encode;
}

// A map of the cache whose boxes are whole rows: `box_rows` of their first 64 numbers, then of the next.
inline bool encode_rows(const Problem& p, int box_rows, CUtensorMap* map) {
  constexpr cuuint32_t kSlices = DDTREE_ROW_DIM / 64;
  const cuuint64_t sizes[4] = {64, static_cast<cuuint64_t>(p.rows), kSlices,
                               static_cast<cuuint64_t>(p.layers) * p.batch};
  const cuuint64_t strides[3] = {DDTREE_ROW_DIM * 2, 128, static_cast<cuuint64_t>(p.rows) * DDTREE_ROW_DIM * 2};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), kSlices, 1}, steps[4] = {1, 1, 1, 1};
  return encoder() != nullptr &&
         encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(p.cache), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The query's map, whose boxes have `query_rows` rows, and the cache's.
inline bool encode_maps(const Problem& p, int query_rows, CUtensorMap* query_map, CUtensorMap* cache_map) {
  const EncodeMap encode = encoder();
  return encode != nullptr &&
         encode_map(encode, p.query, static_cast<int64_t>(p.batch) * p.nodes * p.heads, 0, query_rows, query_map) &&
         encode_map(encode, p.cache, p.rows, static_cast<int64_t>(p.layers) * p.batch, kHopperStep, cache_map);
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_TENSOR_MAP_H_
