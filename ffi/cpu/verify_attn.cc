// Absorbed MLA attention of a tree's rows: an online softmax over tiles of the prefix, then over each row's ancestors.
//
// A work item is a few (node, head) rows of one request. Over the prefix, which all rows see, it forms small blocks
// of scores and of the output in registers. The ancestors of a node are at most a path, so each row takes its own,
// listed: what a row must not see is never read, and NaN there cannot reach it. The arithmetic of a row depends on
// neither the other rows nor the number of tasks.
#include <algorithm>
#include <cmath>

#include "ffi/arguments.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/cpu/verify_attn.h"
#include "ffi/ddtree.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace ddtree {
namespace {

constexpr int64_t kRow = DDTREE_ROW_DIM, kLatent = DDTREE_LATENT_DIM;
constexpr int64_t kKeys = 16;     // keys a tile: 36 KB, which stay in the first-level cache for all rows of an item
constexpr int64_t kMaxRows = 16;  // rows an item

// Blocks of scores and of the output are as large as the registers hold: 32 of 16 floats, or 16 of 8. The vector types
// are members because a template argument would lose their attributes.
struct Quad {
  typedef float Vec __attribute__((vector_size(16), aligned(4), may_alias));
};
struct Narrow {
  typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));
  typedef Quad Half;
};
struct Wide {
  typedef ddtree::Vec Vec;
  typedef Narrow Half;
};

bool HasWideRegisters() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool wide = __builtin_cpu_supports("avx512f");
  return wide;
#else
  return false;
#endif
}

// Sums of four vectors' lanes: halves are added until four lanes are left, then those. Register structs are named, not
// deduced from their vectors, whose attributes a deduction drops.
inline __attribute__((always_inline)) void Sum4(Quad, const Quad::Vec* v, float* sums) {
#ifdef __SSE__
  const float* x = reinterpret_cast<const float*>(v);
  __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + 4), c = _mm_loadu_ps(x + 8), d = _mm_loadu_ps(x + 12);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(sums, _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)));
#else
  for (int i = 0; i < 4; ++i) sums[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
#endif
}
template <typename From>
inline __attribute__((always_inline)) void Sum4(From, const typename From::Vec* v, float* sums) {
  typedef typename From::Half Half;
  typename Half::Vec halves[4];
  for (int i = 0; i < 4; ++i) {
    const typename Half::Vec* half = reinterpret_cast<const typename Half::Vec*>(v + i);
    halves[i] = half[0] + half[1];
  }
  Sum4(Half(), halves, sums);
}

// What an item keeps between tiles.
struct alignas(64) Item {
  float query[kMaxRows * kRow];
  float out[kMaxRows * kLatent];
  float scores[kMaxRows * kKeys];
  float tile[kKeys * kRow];  // keys of fewer bits, widened
  float max[kMaxRows], sum[kMaxRows];
  int64_t path[DDTREE_MAX_NODES];  // a row's ancestors
};

// scores[r, k] = scale * query[r] . keys[k] for rows in blocks, of which `rows` is a multiple; -inf past `count`.
template <typename Registers, int kBlock>
DDTREE_CLONES void Scores(const float* query, int64_t rows, const float* const* keys, int64_t count, float scale,
                          float* scores) {
  typedef typename Registers::Vec V;
  constexpr int64_t kStep = sizeof(V) / sizeof(float);
  for (int64_t r = 0; r < rows; r += kBlock) {
    const float* q = query + r * kRow;
    for (int64_t k = 0; k < kKeys; k += 4) {
      // The last block repeats its last key: one arithmetic for every key, wherever a tile ends.
      const float* key[4];
      for (int64_t j = 0; j < 4; ++j) key[j] = keys[std::min(k + j, count - 1)];
      V acc[kBlock][4] = {};
      if (k < count) {
        for (int64_t d = 0; d < kRow; d += kStep) {
          V y[4];
          for (int j = 0; j < 4; ++j) y[j] = *reinterpret_cast<const V*>(key[j] + d);
          for (int i = 0; i < kBlock; ++i) {
            const V x = *reinterpret_cast<const V*>(q + i * kRow + d);
            for (int j = 0; j < 4; ++j) acc[i][j] += x * y[j];
          }
        }
      }
      for (int i = 0; i < kBlock; ++i) {
        float sums[4];
        Sum4(Registers(), acc[i], sums);
        for (int j = 0; j < 4; ++j) scores[(r + i) * kKeys + k + j] = k + j < count ? sums[j] * scale : -INFINITY;
      }
    }
  }
}

// Turns a tile's scores into weights under the new running maximum and rescales what was summed under the old one.
DDTREE_CLONES void Softmax(float* scores, float* max, float* sum, float* out) {
  static_assert(kKeys == kLanes);
  float top = *max, lanes[kKeys];
  for (int64_t k = 0; k < kKeys; ++k) lanes[k] = scores[k] > top ? scores[k] : top;
  for (int64_t half = kKeys / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) lanes[k] = lanes[k] > lanes[k + half] ? lanes[k] : lanes[k + half];
  }
  top = lanes[0];
  if (top > *max) {
    const float alpha = *max == -INFINITY ? 0.0f : Exp(*max - top);
    *sum *= alpha;
    for (int64_t d = 0; d < kLatent; ++d) out[d] *= alpha;
    *max = top;
  }
  for (int64_t k = 0; k < kKeys; ++k) lanes[k] = scores[k] = Exp(scores[k] - top);
  for (int64_t half = kKeys / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  *sum += lanes[0];
}

// out[r] += sum_k weights[r, k] * latent[k] for rows and columns in blocks.
template <typename Registers, int kRowBlock, int kBlock>
DDTREE_CLONES void Mix(const float* weights, int64_t rows, const float* const* keys, int64_t count, float* out) {
  typedef typename Registers::Vec V;
  constexpr int64_t kStep = sizeof(V) / sizeof(float);
  for (int64_t r = 0; r < rows; r += kRowBlock) {
    const float* w = weights + r * kKeys;
    for (int64_t d = 0; d < kLatent; d += kBlock * kStep) {
      V acc[kRowBlock][kBlock];
      for (int i = 0; i < kRowBlock; ++i) {
        const float* from = out + (r + i) * kLatent + d;
        for (int j = 0; j < kBlock; ++j) acc[i][j] = *reinterpret_cast<const V*>(from + j * kStep);
      }
      for (int64_t k = 0; k < count; ++k) {
        V v[kBlock];
        for (int j = 0; j < kBlock; ++j) v[j] = *reinterpret_cast<const V*>(keys[k] + d + j * kStep);
        for (int i = 0; i < kRowBlock; ++i) {
          for (int j = 0; j < kBlock; ++j) acc[i][j] += w[i * kKeys + k] * v[j];
        }
      }
      for (int i = 0; i < kRowBlock; ++i) {
        for (int j = 0; j < kBlock; ++j) *reinterpret_cast<V*>(out + (r + i) * kLatent + d + j * kStep) = acc[i][j];
      }
    }
  }
}

// One online-softmax step of `rows` rows, a multiple of kRowBlock, over `count` keys.
template <int kRowBlock>
void Attend(const float* query, int64_t rows, const float* const* keys, int64_t count, float scale, float* scores,
            float* max, float* sum, float* out) {
  constexpr int kNarrowRows = kRowBlock < 2 ? kRowBlock : 2;
  const bool wide = HasWideRegisters();
  (wide ? Scores<Wide, kRowBlock> : Scores<Narrow, kNarrowRows>)(query, rows, keys, count, scale, scores);
  for (int64_t r = 0; r < rows; ++r) Softmax(scores + r * kKeys, max + r, sum + r, out + r * kLatent);
  (wide ? Mix<Wide, kRowBlock, 4> : Mix<Narrow, kRowBlock, 2>)(scores, rows, keys, count, out);
}

// Where key `index` can be read as float32: in the cache, or widened in `tile`.
template <typename C>
const float* Key(const C* cache, int64_t index, float* tile) {
  if constexpr (sizeof(C) == 4) {
    return cache + index * kRow;
  } else {
    Widen(cache + index * kRow, kRow, tile);
    return tile;
  }
}

template <typename T>
void Store(const float* x, float factor, T* y) {
  for (int64_t d = 0; d < kLatent; ++d) {
    if constexpr (sizeof(T) == 2) {
      y[d] = ToBf16(x[d] * factor);
    } else {
      y[d] = x[d] * factor;
    }
  }
}

// Rows first .. first + rows - 1 of request b. T is float or bf16's bits, and C the same or e4m3's.
template <typename T, typename C>
void Run(const ddtree_verify_attn_args& a, int64_t b, int64_t first, int64_t rows, Item* item) {
  const int64_t heads = a.heads, words = (a.nodes + 31) / 32;
  const int64_t layer = std::clamp<int64_t>(*a.layer, 0, a.layers - 1);
  const int64_t length = std::clamp<int64_t>(a.lengths[b], 0, a.rows - a.nodes);
  const C* cache = static_cast<const C*>(a.cache) + (layer * a.batch + b) * a.rows * kRow;
  const T* query = static_cast<const T*>(a.query) + (b * a.nodes * heads + first) * kRow;
  T* out = static_cast<T*>(a.out) + (b * a.nodes * heads + first) * kLatent;
  const int64_t num_nodes = std::clamp<int64_t>(a.num_nodes[b], 0, a.nodes);
  const int64_t live = std::clamp<int64_t>(num_nodes * heads - first, 0, rows);

  // What multiplies every number of an e4m3 cache, here the scores and the sums instead.
  const float cache_scale = a.cache_scale != nullptr ? a.cache_scale[layer] : 1.0f;
  const float scale = a.scale * cache_scale;

  for (int64_t r = live; r < rows; ++r) {  // A row that sees itself alone returns its own latent.
    const C* own = cache + (length + (first + r) / heads) * kRow;
    if constexpr (sizeof(C) == 1) {
      Widen(own, kLatent, item->tile);
      Store(item->tile, cache_scale, out + r * kLatent);
    } else {
      std::copy(own, own + kLatent, out + r * kLatent);
    }
  }
  if (live == 0) return;
  const int64_t padded = (live + 3) / 4 * 4;
  std::fill(item->query, item->query + padded * kRow, 0.0f);
  Widen(query, live * kRow, item->query);
  std::fill(item->out, item->out + padded * kLatent, 0.0f);
  std::fill(item->max, item->max + padded, -INFINITY);
  std::fill(item->sum, item->sum + padded, 0.0f);

  const float* keys[kKeys];
  for (int64_t start = 0; start < length; start += kKeys) {
    const int64_t count = std::min(kKeys, length - start);
    for (int64_t k = 0; k < count; ++k) keys[k] = Key(cache, start + k, item->tile + k * kRow);
    Attend<4>(item->query, padded, keys, count, scale, item->scores, item->max, item->sum, item->out);
  }
  for (int64_t r = 0; r < live; ++r) {
    const uint32_t* bits = a.ancestors + (b * a.nodes + (first + r) / heads) * words;
    int64_t path = 0;
    for (int64_t j = 0; j < num_nodes; ++j) {
      if (bits[j / 32] >> (j % 32) & 1) item->path[path++] = length + j;
    }
    for (int64_t start = 0; start < path; start += kKeys) {
      const int64_t count = std::min(kKeys, path - start);
      for (int64_t k = 0; k < count; ++k) keys[k] = Key(cache, item->path[start + k], item->tile + k * kRow);
      Attend<1>(item->query + r * kRow, 1, keys, count, scale, item->scores, item->max + r, item->sum + r,
                item->out + r * kLatent);
    }
    Store(item->out + r * kLatent, cache_scale / item->sum[r], out + r * kLatent);
  }
}

}  // namespace
}  // namespace ddtree

int ddtree_verify_attn_cpu(const ddtree_verify_attn_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  // Too large for a stack; one per pool thread, for the life of the thread.
  static thread_local ddtree::Item item;
  const int64_t rows = a->nodes * a->heads;
  const int64_t step = ddtree::VerifyAttnRows(rows);
  const int64_t blocks = (rows + step - 1) / step;
  for (int64_t i = task; i < a->batch * blocks; i += tasks) {
    const int64_t b = i / blocks, first = i % blocks * step, count = std::min(step, rows - first);
    const bool e4m3 = a->cache_dtype == DDTREE_E4M3;
    if (a->dtype == DDTREE_BF16) {
      (e4m3 ? ddtree::Run<uint16_t, uint8_t> : ddtree::Run<uint16_t, uint16_t>)(*a, b, first, count, &item);
    } else {
      (e4m3 ? ddtree::Run<float, uint8_t> : ddtree::Run<float, float>)(*a, b, first, count, &item);
    }
  }
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(verify_attn)
DDTREE_NO_CUDA_WORKSPACE(verify_attn, int64_t, int64_t, int64_t, int64_t, int32_t)
