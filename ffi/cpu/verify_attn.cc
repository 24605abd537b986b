// Absorbed MLA attention of a tree's rows: an online softmax over tiles of the prefix, then over each row's ancestors.
//
// A work item is a few (node, head) rows of one request. Over the prefix, which all rows see, it forms small blocks
// of scores and of the output in registers. The ancestors of a node are at most a path, so they are taken one
// by one: what a row must not see is never read, and NaN there cannot reach it. The arithmetic of a row depends on
// neither the other rows nor the number of tasks.
#include <algorithm>
#include <cmath>

#include "ffi/cpu/kernels.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace {

constexpr int64_t kRow = DDTREE_ROW_DIM, kLatent = DDTREE_LATENT_DIM;
constexpr int64_t kKeys = 64;       // keys a tile
constexpr int64_t kMaxRows = 16;    // rows an item

// Blocks of scores and of the output are as large as the registers hold: 32 of 16 floats, or 16 of 8. The vector types
// are members because a template argument would lose their attributes.
struct Wide {
  typedef ddtree::Vec Vec;
};
struct Narrow {
  typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));
};

bool HasWideRegisters() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool wide = __builtin_cpu_supports("avx512f");
  return wide;
#else
  return false;
#endif
}

template <typename Registers>
inline __attribute__((always_inline)) float Sum(const typename Registers::Vec& v) {
  constexpr int kSize = sizeof(v) / sizeof(float);
  float lanes[kSize];
  for (int i = 0; i < kSize; ++i) lanes[i] = v[i];
  for (int half = kSize / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// What an item keeps between tiles.
struct Item {
  float query[kMaxRows * kRow];
  float out[kMaxRows * kLatent];
  float scores[kMaxRows * kKeys];
  float tile[kKeys * kRow];  // bf16 keys, widened
  float max[kMaxRows], sum[kMaxRows];
};

DDTREE_CLONES void Widen(const uint16_t* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
    std::memcpy(y + i, &bits, 4);
  }
}

// scores[r, k] = scale * query[r] . keys[k] for rows in blocks; `rows` is a multiple of 4.
template <typename Registers, int kBlock>
DDTREE_CLONES void Scores(const float* query, int64_t rows, const float* keys, int64_t count, float scale, float* scores) {
  typedef typename Registers::Vec V;
  constexpr int64_t kStep = sizeof(V) / sizeof(float);
  for (int64_t r = 0; r < rows; r += kBlock) {
    const float* q = query + r * kRow;
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
      const float* key = keys + k * kRow;
      V acc[kBlock][4] = {};
      for (int64_t d = 0; d < kRow; d += kStep) {
        V y[4];
        for (int j = 0; j < 4; ++j) y[j] = *reinterpret_cast<const V*>(key + j * kRow + d);
        for (int i = 0; i < kBlock; ++i) {
          const V x = *reinterpret_cast<const V*>(q + i * kRow + d);
          for (int j = 0; j < 4; ++j) acc[i][j] += x * y[j];
        }
      }
      for (int i = 0; i < kBlock; ++i) {
        for (int j = 0; j < 4; ++j) scores[(r + i) * kKeys + k + j] = Sum<Registers>(acc[i][j]) * scale;
      }
    }
    for (; k < count; ++k) {
      const float* key = keys + k * kRow;
      V acc[kBlock] = {};
      for (int64_t d = 0; d < kRow; d += kStep) {
        const V y = *reinterpret_cast<const V*>(key + d);
        for (int i = 0; i < kBlock; ++i) acc[i] += *reinterpret_cast<const V*>(q + i * kRow + d) * y;
      }
      for (int i = 0; i < kBlock; ++i) scores[(r + i) * kKeys + k] = Sum<Registers>(acc[i]) * scale;
    }
  }
}

// Turns a tile's scores into weights under the new running maximum and rescales what was summed under the old one.
DDTREE_CLONES void Softmax(float* scores, int64_t count, float* max, float* sum, float* out) {
  float top = *max;
  for (int64_t k = 0; k < count; ++k) top = scores[k] > top ? scores[k] : top;
  if (top > *max) {
    const float alpha = *max == -INFINITY ? 0.0f : Exp(*max - top);
    *sum *= alpha;
    for (int64_t d = 0; d < kLatent; ++d) out[d] *= alpha;
    *max = top;
  }
  float total = 0;
  for (int64_t k = 0; k < count; ++k) scores[k] = Exp(scores[k] - top);
  for (int64_t k = 0; k < count; ++k) total += scores[k];
  *sum += total;
}

// out[r] += sum_k weights[r, k] * latent[k] for rows in fours and columns in blocks.
template <typename Registers, int kBlock>
DDTREE_CLONES void Mix(const float* weights, int64_t rows, const float* keys, int64_t count, float* out) {
  typedef typename Registers::Vec V;
  constexpr int64_t kStep = sizeof(V) / sizeof(float);
  for (int64_t r = 0; r < rows; r += 4) {
    const float* w = weights + r * kKeys;
    for (int64_t d = 0; d < kLatent; d += kBlock * kStep) {
      V acc[4][kBlock];
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < kBlock; ++j) acc[i][j] = *reinterpret_cast<const V*>(out + (r + i) * kLatent + d + j * kStep);
      }
      for (int64_t k = 0; k < count; ++k) {
        V v[kBlock];
        for (int j = 0; j < kBlock; ++j) v[j] = *reinterpret_cast<const V*>(keys + k * kRow + d + j * kStep);
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < kBlock; ++j) acc[i][j] += w[i * kKeys + k] * v[j];
        }
      }
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < kBlock; ++j) *reinterpret_cast<V*>(out + (r + i) * kLatent + d + j * kStep) = acc[i][j];
      }
    }
  }
}

// One key for one row.
DDTREE_CLONES void Attend(const float* query, const float* key, float scale, float* max, float* sum, float* out) {
  Vec acc = {};
  for (int64_t d = 0; d < kRow; d += kLanes) {
    acc += *reinterpret_cast<const Vec*>(query + d) * *reinterpret_cast<const Vec*>(key + d);
  }
  float weight = Sum<Wide>(acc) * scale;
  Softmax(&weight, 1, max, sum, out);
  for (int64_t d = 0; d < kLatent; ++d) out[d] += weight * key[d];
}

template <typename T>
const float* Keys(const T* cache, int64_t count, float* tile) {
  if constexpr (sizeof(T) == 2) {
    Widen(cache, count * kRow, tile);
    return tile;
  } else {
    return cache;
  }
}

template <typename T>
void Store(const float* x, float factor, T* y) {
  for (int64_t d = 0; d < kLatent; ++d) {
    if constexpr (sizeof(T) == 2) y[d] = ToBf16(x[d] * factor); else y[d] = x[d] * factor;
  }
}

// Rows first .. first + rows - 1 of request b.
template <typename T>
void Run(const ddtree_verify_attn_args& a, int64_t b, int64_t first, int64_t rows, Item* item) {
  const int64_t heads = a.heads, words = (a.nodes + 31) / 32;
  const int64_t layer = std::clamp<int64_t>(*a.layer, 0, a.layers - 1);
  const int64_t length = std::clamp<int64_t>(a.lengths[b], 0, a.rows - a.nodes);
  const T* cache = static_cast<const T*>(a.cache) + (layer * a.batch + b) * a.rows * kRow;
  const T* query = static_cast<const T*>(a.query) + (b * a.nodes * heads + first) * kRow;
  T* out = static_cast<T*>(a.out) + (b * a.nodes * heads + first) * kLatent;
  const int64_t live_rows = std::clamp<int64_t>(a.num_nodes[b], 0, a.nodes) * heads;
  const int64_t live = std::clamp<int64_t>(live_rows - first, 0, rows);

  for (int64_t r = live; r < rows; ++r) {  // A row that sees itself alone returns its own latent.
    const T* own = cache + (length + (first + r) / heads) * kRow;
    std::copy(own, own + kLatent, out + r * kLatent);
  }
  if (live == 0) return;
  const int64_t padded = (live + 3) / 4 * 4;
  std::fill(item->query, item->query + padded * kRow, 0.0f);
  for (int64_t i = 0; i < live * kRow; ++i) {
    if constexpr (sizeof(T) == 2) item->query[i] = FromBf16(query[i]); else item->query[i] = query[i];
  }
  std::fill(item->out, item->out + padded * kLatent, 0.0f);
  std::fill(item->max, item->max + padded, -INFINITY);
  std::fill(item->sum, item->sum + padded, 0.0f);

  const bool wide = HasWideRegisters();
  for (int64_t start = 0; start < length; start += kKeys) {
    const int64_t count = std::min(kKeys, length - start);
    const float* keys = Keys(cache + start * kRow, count, item->tile);
    (wide ? Scores<Wide, 4> : Scores<Narrow, 2>)(item->query, padded, keys, count, a.scale, item->scores);
    for (int64_t r = 0; r < padded; ++r) {
      Softmax(item->scores + r * kKeys, count, item->max + r, item->sum + r, item->out + r * kLatent);
    }
    (wide ? Mix<Wide, 4> : Mix<Narrow, 2>)(item->scores, padded, keys, count, item->out);
  }
  for (int64_t r = 0; r < live; ++r) {
    const uint32_t* bits = a.ancestors + (b * a.nodes + (first + r) / heads) * words;
    for (int64_t j = 0; j < a.nodes; ++j) {
      if (!(bits[j / 32] >> (j % 32) & 1)) continue;
      const float* key = Keys(cache + (length + j) * kRow, 1, item->tile);
      Attend(item->query + r * kRow, key, a.scale, item->max + r, item->sum + r, item->out + r * kLatent);
    }
    Store(item->out + r * kLatent, 1.0f / item->sum[r], out + r * kLatent);
  }
}

}  // namespace
}  // namespace ddtree

int ddtree_verify_attn_cpu(const ddtree_verify_attn_args* a, int64_t task, int64_t tasks) {
  if (a->nodes < 1 || a->nodes > DDTREE_MAX_NODES || a->heads < 1 || a->layers < 1 || a->rows < a->nodes || tasks < 1) {
    return DDTREE_INVALID_ARGUMENT;
  }
  // Too large for a stack; one per pool thread, for the life of the thread.
  static thread_local ddtree::Item item;
  const int64_t rows = a->nodes * a->heads;
  const int64_t step = rows <= 32 ? 4 : ddtree::kMaxRows;
  const int64_t blocks = (rows + step - 1) / step;
  for (int64_t i = task; i < a->batch * blocks; i += tasks) {
    const int64_t b = i / blocks, first = i % blocks * step, count = std::min(step, rows - first);
    if (a->dtype == DDTREE_BF16) {
      ddtree::Run<uint16_t>(*a, b, first, count, &item);
    } else {
      ddtree::Run<float>(*a, b, first, count, &item);
    }
  }
  return DDTREE_OK;
}
