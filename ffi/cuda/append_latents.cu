// The tree's rows into one layer of the cache: a thread moves one word.
#include <cuda_runtime.h>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/rows.h"
#include "ffi/ddtree.h"

namespace {

constexpr int kThreads = 256;

template <typename Word>
__global__ void __launch_bounds__(kThreads) append_rows(Word* __restrict__ cache, const Word* __restrict__ latents,
                                                        const int32_t* __restrict__ lengths,
                                                        const int32_t* __restrict__ layer, int64_t layers,
                                                        int64_t batch, int64_t rows, int64_t nodes, int words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t source = i / words;
  const int64_t request = source / nodes;
  if (request >= batch) return;
  const int64_t row = static_cast<int64_t>(lengths[request]) + source % nodes;
  const int64_t to_layer = *layer;
  if (row < 0 || row >= rows || to_layer < 0 || to_layer >= layers) return;
  cache[((to_layer * batch + request) * rows + row) * words + i % words] = latents[i];
}

}  // namespace

int ddtree_append_latents_cuda(const ddtree_append_latents_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  const int64_t bytes = args->width * ddtree::DtypeBytes(args->dtype);
  if (bytes > INT32_MAX) return DDTREE_INVALID_ARGUMENT;
  if (args->layers == 0 || args->batch == 0 || args->rows == 0 || args->nodes == 0) return DDTREE_OK;
  const uintptr_t address = reinterpret_cast<uintptr_t>(args->cache) | reinterpret_cast<uintptr_t>(args->latents);
  return ddtree::with_row_word(bytes, address, [&](auto word) -> int {
    using Word = decltype(word);
    const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
    const int64_t blocks = ddtree::ceil_div(args->batch * args->nodes * words, kThreads);
    if (blocks > INT32_MAX) return DDTREE_INVALID_ARGUMENT;
    append_rows<Word><<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Word*>(args->cache), static_cast<const Word*>(args->latents), args->lengths, args->layer,
        args->layers, args->batch, args->rows, args->nodes, static_cast<int>(words));
    return ddtree::launch_status();
  });
}
