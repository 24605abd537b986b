// Grouped-query attention of a drafter's block over its context and itself, in float32.
//
// It is no entry point of the C ABI: only XLA's CPU backend, which turns the whole context round for a matmul of a few
// rows and reads all of it, filled or not, has use for it. A work item is 16 (slot, head) rows of one key head, one in
// each lane of a vector: no sum goes over lanes, and a head of any size is as good as another. Keys that none of the
// item's rows sees are not read, and NaN there cannot reach it.
#include <algorithm>
#include <cmath>

#include "ffi/cpu/kernels.h"
#include "ffi/ddtree.h"
#include "ffi/xla_cpu/draft_attn.h"

namespace ddtree {
namespace {

constexpr int64_t kTile = 64;  // keys between two looks at the maximum
constexpr int64_t kBlock = 8;  // sums kept in registers

struct Key {
  const float *key, *value;
  int64_t column;
  bool all;  // every row of the item sees it
};

// Whether any and whether every slot sees each of `count` columns; returns whether any sees any.
DDTREE_CLONES bool Seen(const uint8_t* visible, int64_t slots, int64_t stride, int64_t count, uint8_t* any,
                        uint8_t* every) {
  std::memset(any, 0, kTile), std::memset(every, 1, kTile);
  for (int64_t slot = 0; slot < slots; ++slot, visible += stride) {
    for (int64_t i = 0; i < count; ++i) any[i] |= visible[i], every[i] &= visible[i];
  }
  uint8_t some = 0;
  for (int64_t i = 0; i < kTile; ++i) some |= any[i];
  return some != 0;
}

// scores[i] = query . keys[i] for all lanes, of `count` keys.
DDTREE_CLONES void Scores(const Vec* query, int64_t dim, const Key* keys, int64_t count, Vec* scores) {
  for (int64_t i = 0; i < count; i += kBlock) {
    const float* key[kBlock];  // the last block repeats its last key
    for (int64_t j = 0; j < kBlock; ++j) key[j] = keys[std::min(i + j, count - 1)].key;
    Vec sums[kBlock] = {};
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t j = 0; j < kBlock; ++j) sums[j] += query[d] * key[j][d];
    }
    for (int64_t j = 0; j < std::min(kBlock, count - i); ++j) scores[i + j] = sums[j];
  }
}

// Scores to weights under the new maximum; what was summed under the old one is to be multiplied by `factor`. Vectors
// go by address: clones would pass them in registers of their own.
DDTREE_CLONES void Softmax(Vec* scores, int64_t count, Vec* max, Vec* sum, float* factor) {
  float top[kLanes], total[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) top[r] = (*max)[r];
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t r = 0; r < kLanes; ++r) top[r] = scores[i][r] > top[r] ? scores[i][r] : top[r];
  }
  for (int64_t r = 0; r < kLanes; ++r) {
    // A row that has seen nothing yet keeps sums of zero.
    factor[r] = top[r] == -INFINITY ? 0.0f : Exp((*max)[r] - top[r]);
    total[r] = (*sum)[r] * factor[r];
  }
  for (int64_t i = 0; i < count; ++i) {
    float* weights = reinterpret_cast<float*>(scores + i);
    for (int64_t r = 0; r < kLanes; ++r) {
      const float weight = weights[r] == -INFINITY ? 0.0f : Exp(weights[r] - top[r]);
      weights[r] = weight;
      total[r] += weight;
    }
  }
  std::memcpy(max, top, sizeof top);
  std::memcpy(sum, total, sizeof total);
}

// out[d] = factor * out[d] + sum_i weights[i] * values[i][d] for all lanes.
DDTREE_CLONES void Mix(const Vec* weights, const Key* keys, int64_t count, int64_t dim, const Vec* factors, Vec* out) {
  const Vec factor = *factors;
  int64_t d = 0;
  for (; d + 2 * kBlock <= dim; d += 2 * kBlock) {
    Vec sums[2 * kBlock];
    for (int64_t j = 0; j < 2 * kBlock; ++j) sums[j] = out[d + j] * factor;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < 2 * kBlock; ++j) sums[j] += weights[i] * keys[i].value[d + j];
    }
    for (int64_t j = 0; j < 2 * kBlock; ++j) out[d + j] = sums[j];
  }
  for (; d < dim; ++d) {
    Vec sum = out[d] * factor;
    for (int64_t i = 0; i < count; ++i) sum += weights[i] * keys[i].value[d];
    out[d] = sum;
  }
}

// Rows first .. first + 15 of one key head; row r is slot r / group and head r % group of it.
void Item(const DraftAttnArgs& a, int64_t b, int64_t head, int64_t first, Vec* query, Vec* out) {
  const int64_t group = a.heads / a.kv_heads, rows = std::min(kLanes, a.slots * group - first);
  const int64_t columns = a.context + a.slots;
  const uint8_t* visible[kLanes];
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(a.dim)));
  for (int64_t r = 0; r < kLanes; ++r) {
    const int64_t row = first + std::min(r, rows - 1), slot = row / group;  // spare lanes repeat the last row
    visible[r] = a.visible + (b * a.slots + slot) * columns;
    const float* from = a.query + ((b * a.slots + slot) * a.heads + head * group + row % group) * a.dim;
    for (int64_t d = 0; d < a.dim; ++d) query[d][r] = from[d] * scale;
  }
  std::fill_n(reinterpret_cast<float*>(out), a.dim * kLanes, 0.0f);
  const int64_t first_slot = first / group, last_slot = (first + rows - 1) / group;
  const int64_t kept = a.context * a.dim, at = (b * a.kv_heads + head) * kept;
  Vec max = Vec{} - INFINITY, sum = {};
  Key keys[kTile];
  alignas(64) Vec scores[kTile];
  for (int64_t start = 0; start < columns; start += kTile) {
    uint8_t any[kTile], every[kTile];
    const int64_t width = std::min(kTile, columns - start);
    if (!Seen(a.visible + (b * a.slots + first_slot) * columns + start, last_slot - first_slot + 1, columns, width, any,
              every)) {
      continue;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < width; ++i) {
      if (any[i] == 0) continue;
      const int64_t column = start + i, near = ((b * a.slots + column - a.context) * a.kv_heads + head) * a.dim;
      const bool own = column >= a.context;
      keys[count++] = {own ? a.near_keys + near : a.keys + at + column * a.dim,
                       own ? a.near_values + near : a.values + at + column * a.dim, column, every[i] != 0};
    }
    Scores(query, a.dim, keys, count, scores);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < kLanes && !keys[i].all; ++r) {
        if (visible[r][keys[i].column] == 0) scores[i][r] = -INFINITY;
      }
    }
    Vec factor;
    Softmax(scores, count, &max, &sum, reinterpret_cast<float*>(&factor));
    Mix(scores, keys, count, a.dim, &factor, out);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = first + r;
    float* to = a.out + ((b * a.slots + row / group) * a.heads + head * group + row % group) * a.dim;
    for (int64_t d = 0; d < a.dim; ++d) to[d] = out[d][r] / sum[r];
  }
}

}  // namespace

int64_t DraftAttnItems(const DraftAttnArgs& a) {
  const int64_t rows = a.slots * (a.heads / a.kv_heads);
  return a.batch * a.kv_heads * ((rows + kLanes - 1) / kLanes);
}

int DraftAttn(const DraftAttnArgs* args, int64_t task, int64_t tasks) {
  const DraftAttnArgs& a = *args;
  const int64_t items = DraftAttnItems(a), blocks = items / (a.batch * a.kv_heads);
  alignas(64) Vec query[kMostDim], out[kMostDim];
  for (int64_t item = items * task / tasks; item < items * (task + 1) / tasks; ++item) {
    const int64_t head = item / blocks;
    Item(a, head / a.kv_heads, head % a.kv_heads, item % blocks * kLanes, query, out);
  }
  return DDTREE_OK;
}

}  // namespace ddtree
