// Writes a round's latent rows into the cache.
#include <cstring>

#include "ffi/arguments.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/ddtree.h"
#include "ffi/e4m3.h"

namespace ddtree {
namespace {

template <typename T>
void Quantise(const T* x, int64_t count, float scale, uint8_t* y) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == 2) {
      y[i] = ToE4m3(FromBf16(x[i]), scale);
    } else {
      y[i] = ToE4m3(x[i], scale);
    }
  }
}

}  // namespace
}  // namespace ddtree

int ddtree_append_latents_cpu(const ddtree_append_latents_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  const int64_t layer = *a->layer;
  if (layer < 0 || layer >= a->layers) return DDTREE_OK;
  const int64_t bytes = a->width * ddtree::DtypeBytes(a->dtype);
  const int64_t cache_bytes = a->width * ddtree::CacheBytes(a->cache_dtype, a->dtype);
  const float scale = a->cache_scale != nullptr ? a->cache_scale[layer] : 1.0f;
  for (int64_t b = task; b < a->batch; b += tasks) {
    auto* cache = static_cast<char*>(a->cache) + (layer * a->batch + b) * a->rows * cache_bytes;
    const auto* latents = static_cast<const char*>(a->latents) + b * a->nodes * bytes;
    const int64_t first = a->lengths[b];
    for (int64_t i = 0; i < a->nodes; ++i) {
      const int64_t row = first + i;
      if (row < 0 || row >= a->rows) continue;
      void* to = cache + row * cache_bytes;
      const void* from = latents + i * bytes;
      if (a->cache_dtype != DDTREE_E4M3) {
        std::memcpy(to, from, bytes);
      } else if (a->dtype == DDTREE_BF16) {
        ddtree::Quantise(static_cast<const uint16_t*>(from), a->width, scale, static_cast<uint8_t*>(to));
      } else {
        ddtree::Quantise(static_cast<const float*>(from), a->width, scale, static_cast<uint8_t*>(to));
      }
    }
  }
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(append_latents)
