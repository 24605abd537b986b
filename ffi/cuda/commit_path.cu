// The accepted rows of every layer moved up, in place: a thread moves one word column of one request in one layer,
// eight rows at a time. It reads its eight before it writes them, and later eights read rows after all that are written
// by then (nodes[j] >= j), so no thread needs another.
#include <cuda_runtime.h>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/rows.h"
#include "ffi/ddtree.h"

namespace {

constexpr int kThreads = 128;
constexpr int kRows = 8;  // in flight

template <typename Word>
__global__ void __launch_bounds__(kThreads) move_rows(Word* __restrict__ cache, const int32_t* __restrict__ nodes,
                                                      const int32_t* __restrict__ num_emitted,
                                                      const int32_t* __restrict__ lengths, int64_t slabs, int batch,
                                                      int64_t rows, int words, int path) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t slab = i / words;  // layer and request
  if (slab >= slabs) return;
  const int request = static_cast<int>(slab % batch);
  const int count = min(num_emitted[request], path);
  const int64_t length = lengths[request];
  Word* column = cache + slab * rows * words + i % words;
  for (int first = 0; first < count; first += kRows) {
    Word held[kRows];
    int64_t source[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      source[j] = first + j < path ? nodes[static_cast<int64_t>(request) * path + first + j] : -1;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t from = length + source[j], to = length + first + j;
      const bool moves = first + j < count && source[j] >= 0 && from != to && from >= 0 && from < rows && to >= 0 &&
                         to < rows;
      source[j] = moves ? from : -1;
      if (moves) held[j] = column[from * words];
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (source[j] >= 0) column[(length + first + j) * words] = held[j];
    }
  }
}

}  // namespace

int ddtree_commit_path_cuda(const ddtree_commit_path_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  const int64_t element = ddtree::RowElementBytes(args->dtype);
  // A path is walked kRows at a time by a 32-bit index.
  if (args->batch > INT32_MAX || args->path > INT32_MAX - kRows ||
      !ddtree::ProductWithin(INT32_MAX, {args->width, element})) {
    return DDTREE_INVALID_ARGUMENT;
  }
  const int64_t bytes = args->width * element;
  const int64_t slabs = args->layers * args->batch;
  if (slabs == 0 || args->rows == 0 || args->path == 0) return DDTREE_OK;
  return ddtree::with_row_word(bytes, reinterpret_cast<uintptr_t>(args->cache), [&](auto word) -> int {
    using Word = decltype(word);
    const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
    const auto blocks = ddtree::grid_blocks({args->layers, args->batch, words}, kThreads);
    if (!blocks) return DDTREE_INVALID_ARGUMENT;
    move_rows<Word><<<*blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Word*>(args->cache), args->nodes, args->num_emitted, args->lengths, slabs,
        static_cast<int>(args->batch), args->rows, static_cast<int>(words), static_cast<int>(args->path));
    return ddtree::launch_status();
  });
}
