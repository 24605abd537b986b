// The k largest logits of each row in exact order, normalised over the whole row.
#include <algorithm>
#include <cmath>

#include "ffi/arguments.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace {

constexpr int64_t kTile = 512;  // logits that are read, summed and filtered while they are in the first-level cache

struct Entry {
  float logit;
  int32_t id;
};

// Logit descending, then id ascending.
inline bool Before(const Entry& x, const Entry& y) { return x.logit != y.logit ? x.logit > y.logit : x.id < y.id; }

// Copies a tile to float32 with NaN as -inf and returns its maximum.
template <typename T>
DDTREE_CLONES float Load(const T* x, int64_t count, float* tile) {
  for (int64_t i = 0; i < count; ++i) {
    float y;
    if constexpr (sizeof(T) == 2) {
      y = FromBf16(x[i]);
    } else {
      y = x[i];
    }
    tile[i] = y == y ? y : -INFINITY;
  }
  float max = -INFINITY;
  int64_t i = 0;
  if (count >= kLanes) {
    Vec lanes = *reinterpret_cast<const Vec*>(tile);
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
      const Vec y = *reinterpret_cast<const Vec*>(tile + i);
      lanes = y > lanes ? y : lanes;
    }
    for (int j = 0; j < kLanes; ++j) max = std::max(max, lanes[j]);
  }
  for (; i < count; ++i) max = std::max(max, tile[i]);
  return max;
}

DDTREE_CLONES double SumExp(const float* tile, int64_t count, float max) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int j = 0; j < 16; ++j) lanes[j] += tile[i + j] - max < -87.0f ? 0.0f : Exp(tile[i + j] - max);
  }
  double sum = 0;
  for (float lane : lanes) sum += lane;
  for (; i < count; ++i) sum += tile[i] - max < -87.0f ? 0.0f : Exp(tile[i] - max);
  return sum;
}

// Appends the entries above the bar (a tie with it comes later in id order and so loses) to the pool.
DDTREE_CLONES int64_t Filter(const float* tile, int64_t count, int32_t first, float bar, Entry* pool, int64_t size) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    int any = 0;
    for (int j = 0; j < 32; ++j) any |= tile[i + j] > bar;
    if (!any) continue;
    for (int j = 0; j < 32; ++j) {
      if (tile[i + j] > bar) pool[size++] = {tile[i + j], first + static_cast<int32_t>(i) + j};
    }
  }
  for (; i < count; ++i) {
    if (tile[i] > bar) pool[size++] = {tile[i], first + static_cast<int32_t>(i)};
  }
  return size;
}

template <typename T>
void Row(const T* logits, int64_t vocab, int64_t k, float* log_probs, int32_t* ids) {
  float tile[kTile];
  Entry pool[2 * DDTREE_MAX_CANDIDATES + kTile];
  int64_t size = 0;
  float max = -INFINITY, bar = -INFINITY;
  double sum = 0;
  for (int64_t first = 0; first < vocab; first += kTile) {
    const int64_t count = std::min(kTile, vocab - first);
    const float tile_max = Load(logits + first, count, tile);
    if (tile_max > max) {
      sum = max == -INFINITY ? 0 : sum * std::exp(static_cast<double>(max) - tile_max);
      max = tile_max;
    }
    if (std::isfinite(max)) sum += SumExp(tile, count, max);
    if (size < k) {
      // Until k are known nothing may be dropped, -inf included.
      for (int64_t i = 0; i < count; ++i) pool[size++] = {tile[i], static_cast<int32_t>(first + i)};
    } else if (tile_max > bar) {
      size = Filter(tile, count, static_cast<int32_t>(first), bar, pool, size);
    }
    // The pool is cut back when it has doubled: an old bar only lets in more than it had to.
    if (size >= 2 * k || (size >= k && bar == -INFINITY)) {
      std::nth_element(pool, pool + k - 1, pool + size, Before);
      size = k;
      bar = pool[k - 1].logit;
    }
  }
  std::partial_sort(pool, pool + k, pool + size, Before);
  // float32 on purpose: logits a coarse step apart stay exactly that far apart, and paths that tie in the reference do
  // so here.
  const float normaliser = static_cast<float>(max + std::log(sum));
  for (int64_t j = 0; j < k; ++j) {
    log_probs[j] = std::isfinite(normaliser) ? std::min(pool[j].logit - normaliser, 0.0f) : -INFINITY;
    ids[j] = pool[j].id;
  }
}

}  // namespace
}  // namespace ddtree

int ddtree_draft_topk_cpu(const ddtree_draft_topk_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  for (int64_t row = task; row < a->rows; row += tasks) {
    float* log_probs = a->log_probs + row * a->k;
    int32_t* ids = a->token_ids + row * a->k;
    if (a->dtype == DDTREE_BF16) {
      ddtree::Row(static_cast<const uint16_t*>(a->logits) + row * a->vocab, a->vocab, a->k, log_probs, ids);
    } else {
      ddtree::Row(static_cast<const float*>(a->logits) + row * a->vocab, a->vocab, a->k, log_probs, ids);
    }
  }
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(draft_topk)
DDTREE_NO_CUDA_WORKSPACE(draft_topk, int64_t, int64_t, int64_t)
