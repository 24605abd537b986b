// Moves the accepted path's cache rows up behind the committed prefix.
#include <cstring>

#include "ffi/arguments.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/ddtree.h"

int ddtree_commit_path_cpu(const ddtree_commit_path_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  if (a->rows == 0 || a->path == 0) return DDTREE_OK;
  const int64_t bytes = a->width * ddtree::RowElementBytes(a->dtype);
  for (int64_t item = task; item < a->layers * a->batch; item += tasks) {
    const int64_t b = item % a->batch;
    auto* cache = static_cast<char*>(a->cache) + item * a->rows * bytes;
    const int64_t first = a->lengths[b];
    const int64_t count = a->num_emitted[b] < a->path ? a->num_emitted[b] : a->path;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t node = a->nodes[b * a->path + j], from = first + node, to = first + j;
      if (node < 0 || from == to || to < 0 || to >= a->rows || from < 0 || from >= a->rows) continue;
      std::memcpy(cache + to * bytes, cache + from * bytes, bytes);
    }
  }
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(commit_path)
