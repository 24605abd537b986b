// Routed experts with packed int4 weights: each chosen expert's rows are unpacked once, a few at a time, and applied to
// every token of the task that chose it.
//
// Tasks take disjoint tokens, and a token sums its experts in ascending order, so that its result depends on neither
// the other tokens nor the number of tasks.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ffi/cpu/kernels.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace {

constexpr int64_t kGroup = 32;  // inputs that share a scale
constexpr int64_t kRows = 4;    // weight rows that are unpacked together: one read of a token's numbers serves them all
constexpr int64_t kLanes = 16;

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef float Half __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t Ints __attribute__((vector_size(32)));
typedef int32_t SignedInts __attribute__((vector_size(32), may_alias));

// Unpacks rows of `inputs` weights: a word spreads over eight lanes, each of which shifts its own nibble down.
DDTREE_CLONES void Unpack(const int32_t* words, const uint16_t* scales, int64_t rows, int64_t inputs, float* out) {
  constexpr Ints kShifts = {0, 4, 8, 12, 16, 20, 24, 28};
  for (int64_t g = 0; g < rows * inputs / kGroup; ++g) {
    const float scale = FromBf16(scales[g]), offset = -8 * scale;  // exact, as is every sum with it
    for (int64_t w = 0; w < kGroup / 8; ++w) {
      const Ints nibbles = (Ints{} + static_cast<uint32_t>(words[g * (kGroup / 8) + w])) >> kShifts & 15;
      const Half q = __builtin_convertvector(reinterpret_cast<const SignedInts&>(nibbles), Half);
      *reinterpret_cast<Half*>(out + g * kGroup + 8 * w) = q * scale + offset;
    }
  }
}

// out[r] = rows[r] . x for kRows rows.
DDTREE_CLONES void Dot(const float* rows, const float* x, int64_t inputs, float* out) {
  Vec acc[kRows] = {};
  for (int64_t d = 0; d < inputs; d += kLanes) {
    const Vec y = *reinterpret_cast<const Vec*>(x + d);
    for (int r = 0; r < kRows; ++r) acc[r] += *reinterpret_cast<const Vec*>(rows + r * inputs + d) * y;
  }
  for (int r = 0; r < kRows; ++r) {
    float half[8];
    for (int i = 0; i < 8; ++i) half[i] = acc[r][i] + acc[r][i + 8];
    out[r] = ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
  }
}

inline float Silu(float x) { return x / (1.0f + std::exp(-x)); }

struct Pair {
  int64_t token;  // in the task
  float weight;
};

struct Scratch {
  std::vector<float> x, out, inner, rows;
  std::vector<Pair> pairs;
};

template <typename T>
void Run(const ddtree_expert_mlp_args& a, int64_t first, int64_t count, Scratch* s) {
  const int64_t d = a.hidden, inner = a.inner;
  const T* x = static_cast<const T*>(a.x) + first * d;
  T* out = static_cast<T*>(a.out) + first * d;
  s->x.resize(count * d);
  s->out.assign(count * d, 0.0f);
  s->rows.resize(kRows * std::max(d, inner));
  for (int64_t i = 0; i < count * d; ++i) {
    if constexpr (sizeof(T) == 2) s->x[i] = FromBf16(x[i]); else s->x[i] = x[i];
  }
  for (int64_t e = 0; e < a.experts; ++e) {
    s->pairs.clear();
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t j = 0; j < a.top_k; ++j) {
        const int64_t at = (first + t) * a.top_k + j;
        if (a.expert_ids[at] == e) s->pairs.push_back({t, a.expert_weights[at]});
      }
    }
    if (s->pairs.empty()) continue;
    // [pair, 2 I]: gate and up, then their product in the gate's place.
    s->inner.resize(s->pairs.size() * 2 * inner);
    for (int64_t r = 0; r < 2 * inner; r += kRows) {
      const int64_t row = e * 2 * inner + r;
      Unpack(a.gate_up + row * (d / 8), a.gate_up_scale + row * (d / kGroup), kRows, d, s->rows.data());
      for (size_t p = 0; p < s->pairs.size(); ++p) {
        Dot(s->rows.data(), &s->x[s->pairs[p].token * d], d, &s->inner[p * 2 * inner + r]);
      }
    }
    for (size_t p = 0; p < s->pairs.size(); ++p) {
      float* gate = &s->inner[p * 2 * inner];
      for (int64_t i = 0; i < inner; ++i) gate[i] = Silu(gate[i]) * gate[inner + i];
    }
    for (int64_t r = 0; r < d; r += kRows) {
      const int64_t row = e * d + r;
      Unpack(a.down + row * (inner / 8), a.down_scale + row * (inner / kGroup), kRows, inner, s->rows.data());
      for (size_t p = 0; p < s->pairs.size(); ++p) {
        float y[kRows];
        Dot(s->rows.data(), &s->inner[p * 2 * inner], inner, y);
        float* total = &s->out[s->pairs[p].token * d + r];
        for (int i = 0; i < kRows; ++i) total[i] += s->pairs[p].weight * y[i];
      }
    }
  }
  for (int64_t i = 0; i < count * d; ++i) {
    if constexpr (sizeof(T) == 2) out[i] = ToBf16(s->out[i]); else out[i] = s->out[i];
  }
}

}  // namespace
}  // namespace ddtree

int ddtree_expert_mlp_cpu(const ddtree_expert_mlp_args* a, int64_t task, int64_t tasks) {
  if (a->hidden % ddtree::kGroup || a->inner % ddtree::kGroup || a->tokens < 0 || a->top_k < 0 || tasks < 1) {
    return DDTREE_INVALID_ARGUMENT;
  }
  // Grows to the largest call's size and stays: one per pool thread.
  static thread_local ddtree::Scratch scratch;
  const int64_t first = a->tokens * task / tasks, count = a->tokens * (task + 1) / tasks - first;
  if (count == 0) return DDTREE_OK;
  if (a->dtype == DDTREE_BF16) {
    ddtree::Run<uint16_t>(*a, first, count, &scratch);
  } else {
    ddtree::Run<float>(*a, first, count, &scratch);
  }
  return DDTREE_OK;
}
