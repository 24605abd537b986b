// The tree's rows into one layer of the cache: a thread moves one word, or rounds one number to e4m3.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/rows.h"
#include "ffi/ddtree.h"
#include "ffi/e4m3.h"

namespace {

constexpr int kThreads = 256;

// What a cache's word becomes of a latent's.
template <typename Word>
__device__ __forceinline__ void write(Word* to, Word from, const float*, int64_t) {
  *to = from;
}
__device__ __forceinline__ void write(uint8_t* to, float from, const float* scale, int64_t layer) {
  *to = ddtree::ToE4m3(from, scale == nullptr ? 1.0f : scale[layer]);
}
__device__ __forceinline__ void write(uint8_t* to, __nv_bfloat16 from, const float* scale, int64_t layer) {
  write(to, __bfloat162float(from), scale, layer);
}

template <typename Word, typename From>
__global__ void __launch_bounds__(kThreads)
    append_rows(Word* __restrict__ cache, const From* __restrict__ latents, const int32_t* __restrict__ lengths,
                const int32_t* __restrict__ layer, const float* __restrict__ cache_scale, int64_t layers, int64_t batch,
                int64_t rows, int64_t nodes, int words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t source = i / words;
  const int64_t request = source / nodes;
  if (request >= batch) return;
  const int64_t row = static_cast<int64_t>(lengths[request]) + source % nodes;
  const int64_t to_layer = *layer;
  if (row < 0 || row >= rows || to_layer < 0 || to_layer >= layers) return;
  write(&cache[((to_layer * batch + request) * rows + row) * words + i % words], latents[i], cache_scale, to_layer);
}

}  // namespace

int ddtree_append_latents_cuda(const ddtree_append_latents_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  const int64_t element = ddtree::DtypeBytes(args->dtype);
  if (!ddtree::ProductWithin(INT32_MAX, {args->width, element})) return DDTREE_INVALID_ARGUMENT;
  const int64_t bytes = args->width * element;
  if (args->layers == 0 || args->batch == 0 || args->rows == 0 || args->nodes == 0) return DDTREE_OK;
  const auto launch = [&](auto* cache, const auto* latents, int64_t words) -> int {
    const auto blocks = ddtree::grid_blocks({args->batch, args->nodes, words}, kThreads);
    if (!blocks) return DDTREE_INVALID_ARGUMENT;
    append_rows<<<*blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        cache, latents, args->lengths, args->layer, args->cache_scale, args->layers, args->batch, args->rows,
        args->nodes, static_cast<int>(words));
    return ddtree::launch_status();
  };
  if (args->cache_dtype == DDTREE_E4M3) {
    auto* cache = static_cast<uint8_t*>(args->cache);
    return args->dtype == DDTREE_F32 ? launch(cache, static_cast<const float*>(args->latents), args->width)
                                     : launch(cache, static_cast<const __nv_bfloat16*>(args->latents), args->width);
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(args->cache) | reinterpret_cast<uintptr_t>(args->latents);
  return ddtree::with_row_word(bytes, address, [&](auto word) -> int {
    using Word = decltype(word);
    return launch(static_cast<Word*>(args->cache), static_cast<const Word*>(args->latents),
                  bytes / static_cast<int64_t>(sizeof(Word)));
  });
}
