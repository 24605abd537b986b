// Maps of bfloat16 rows for TMA, in the layout that sm90.h describes.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_TENSOR_MAP_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/cuda/verify_attn/problem.h"
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

// The driver's function, or null.
inline EncodeMap encoder() {
  static const EncodeMap encode = find_encoder();
  return encode;
}

// A map of `planes` planes of `rows` rows. A row is nine slices of 64 elements; a box is `box_rows` rows of a slice,
// then the same rows of the next, `slices` in all.
inline bool encode_map(const void* data, int64_t rows, int64_t planes, int box_rows, int slices,
                       CUtensorMap* map, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  const EncodeMap encode = encoder();
  constexpr cuuint64_t kSlices = DDTREE_ROW_DIM / 64;
  const cuuint64_t sizes[4] = {64, static_cast<cuuint64_t>(rows), kSlices, static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[3] = {DDTREE_ROW_DIM * 2, 128, static_cast<cuuint64_t>(rows) * DDTREE_ROW_DIM * 2};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(slices), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode != nullptr &&
         encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A map of the query's rows, as one plane.
inline bool encode_query(const Problem& p, int box_rows, int slices, CUtensorMap* map) {
  return encode_map(p.query, static_cast<int64_t>(p.batch) * p.nodes * p.heads, 1, box_rows, slices,
                    map);
}

// A map of the cache, a plane for each layer and request.
inline bool encode_cache(const Problem& p, int box_rows, int slices, CUtensorMap* map,
                         CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  return encode_map(p.cache, p.rows, static_cast<int64_t>(p.layers) * p.batch, box_rows, slices, map, promotion);
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_TENSOR_MAP_H_
