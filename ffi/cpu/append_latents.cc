// Writes a round's latent rows into the cache.
#include <cstring>

#include "ffi/arguments.h"
#include "ffi/ddtree.h"

int ddtree_append_latents_cpu(const ddtree_append_latents_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  const int64_t layer = *a->layer;
  if (layer < 0 || layer >= a->layers) return DDTREE_OK;
  const int64_t bytes = a->width * ddtree::DtypeBytes(a->dtype);
  for (int64_t b = task; b < a->batch; b += tasks) {
    auto* cache = static_cast<char*>(a->cache) + (layer * a->batch + b) * a->rows * bytes;
    const auto* latents = static_cast<const char*>(a->latents) + b * a->nodes * bytes;
    const int64_t first = a->lengths[b];
    for (int64_t i = 0; i < a->nodes; ++i) {
      const int64_t row = first + i;
      if (row >= 0 && row < a->rows) std::memcpy(cache + row * bytes, latents + i * bytes, bytes);
    }
  }
  return DDTREE_OK;
}
