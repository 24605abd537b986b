// Routed experts with packed int4 weights: each chosen expert's rows are unpacked a few at a time, once for all tokens
// that chose it, or with AVX-512 in registers, once for every four of them.
//
// Tasks take disjoint experts and leave what each makes of each token in `partial`; a second pass weighs and sums that
// in the order of the token's choices, so that its result depends on neither the other tokens nor the number of tasks.
#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/ddtree.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DDTREE_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#endif

namespace ddtree {
namespace {

constexpr int64_t kGroup = 32;  // inputs that share a scale
constexpr int64_t kRows = 4;    // weight rows that are unpacked together: one read of a token serves them all
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

#ifdef DDTREE_AVX512
// Sums of four vectors.
DDTREE_AVX512 inline __m128 Sum4(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const __m512 all =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// out[t][r] = rows[r] . x[t] for kRows packed rows and kTokens tokens, the weights never leaving registers. Sixteen
// cost three instructions: two words are broadcast side by side, every lane shifts its own nibble down, and the nibble
// picks q * scale out of a register of all sixteen. The weights then lie interleaved, word 0 in even lanes and word 1
// in odd ones, so the inputs are laid the same way once (`Interleave`).
template <int kTokens>
DDTREE_AVX512 void DotWide(const int32_t* words, const float* scales, int64_t inputs, const float* const* x,
                           float* const* out) {
  const __m512i shifts = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
  const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  const int64_t groups = inputs / kGroup;
  __m512 acc[kTokens][kRows];
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kRows; ++r) acc[t][r] = _mm512_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    __m512 table[kRows];
    for (int r = 0; r < kRows; ++r) table[r] = _mm512_mul_ps(values, _mm512_set1_ps(scales[r * groups + g]));
    for (int64_t w = 0; w < 2; ++w) {
      __m512 y[kTokens];
      for (int t = 0; t < kTokens; ++t) y[t] = _mm512_loadu_ps(x[t] + g * kGroup + 16 * w);
      for (int r = 0; r < kRows; ++r) {
        int64_t pair;
        std::memcpy(&pair, words + (r * groups + g) * 4 + 2 * w, 8);
        const __m512i nibbles = _mm512_srlv_epi32(_mm512_set1_epi64(pair), shifts);
        const __m512 q = _mm512_permutexvar_ps(nibbles, table[r]);
        for (int t = 0; t < kTokens; ++t) acc[t][r] = _mm512_fmadd_ps(q, y[t], acc[t][r]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) _mm_storeu_ps(out[t], Sum4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]));
}

const bool kWide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
constexpr bool kWide = false;
template <int kTokens>
void DotWide(const int32_t*, const float*, int64_t, const float* const*, float* const*) {}
#endif

// out[i][r] = rows[r] . x[i] for kRows packed rows and `count` tokens; `scratch` has room for the rows' weights.
void Dots(const int32_t* words, const uint16_t* scales, int64_t inputs, const float* const* x, float* const* out,
          int64_t count, float* scratch) {
  if (!kWide) {
    Unpack(words, scales, kRows, inputs, scratch);
    for (int64_t i = 0; i < count; ++i) Dot(scratch, x[i], inputs, out[i]);
    return;
  }
  Widen(scales, kRows * inputs / kGroup, scratch);
  for (; count >= 4; count -= 4, x += 4, out += 4) DotWide<4>(words, scratch, inputs, x, out);
  if (count == 3) DotWide<3>(words, scratch, inputs, x, out);
  if (count == 2) DotWide<2>(words, scratch, inputs, x, out);
  if (count == 1) DotWide<1>(words, scratch, inputs, x, out);
}

// Lays elements out as DotWide lays out weights.
void Interleave(float* x, int64_t count) {
  for (int64_t g = 0; g < count; g += 16) {
    float y[16];
    for (int i = 0; i < 8; ++i) y[2 * i] = x[g + i], y[2 * i + 1] = x[g + 8 + i];
    std::copy(y, y + 16, x + g);
  }
}

// gate = silu(gate) * up. exp(-|x|) cannot overflow, and either form of the sigmoid follows from it.
DDTREE_CLONES void Swiglu(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = gate[i], e = Exp(x < 0 ? x : -x);
    gate[i] = x * (x < 0 ? e : 1.0f) / (1.0f + e) * up[i];
  }
}

struct Scratch {
  std::vector<float> x, inner, rows;
  std::vector<int64_t> counts, loads, pairs;
  std::vector<const float*> from;
  std::vector<float*> to;
};

// Marks the experts of this task in `counts` (how many choices fell on each, 0 for other tasks' experts): each goes to
// the task with the least work so far. No more tasks get any than there are experts with choices.
void Share(const ddtree_expert_mlp_args& a, int64_t task, int64_t tasks, Scratch* s) {
  s->counts.assign(a.experts, 0);
  s->loads.assign(std::min({tasks, a.experts, a.tokens * a.top_k}), 0);
  for (int64_t p = 0; p < a.tokens * a.top_k; ++p) {
    if (a.expert_ids[p] >= 0 && a.expert_ids[p] < a.experts) ++s->counts[a.expert_ids[p]];
  }
  for (int64_t& count : s->counts) {
    if (count == 0) continue;
    const auto least = std::min_element(s->loads.begin(), s->loads.end());
    *least += 2 + count;  // unpacking costs about as much as two tokens
    if (least - s->loads.begin() != task) count = 0;
  }
}

// Whether anything is multiplied. Without, sizes may be as large as they like: no array need be there.
bool HasWork(const ddtree_expert_mlp_args& a) {
  return a.tokens > 0 && a.top_k > 0 && a.experts > 0 && a.hidden > 0 && a.inner > 0;
}

template <typename T>
void Run(const ddtree_expert_mlp_args& a, int64_t task, int64_t tasks, Scratch* s) {
  const int64_t d = a.hidden, inner = a.inner, tokens = a.tokens;
  Share(a, task, tasks, s);
  if (std::all_of(s->counts.begin(), s->counts.end(), [](int64_t count) { return count == 0; })) return;
  s->rows.resize(kRows * std::max(d, inner));
  s->x.resize(tokens * d);
  Widen(static_cast<const T*>(a.x), tokens * d, s->x.data());
  if (kWide) Interleave(s->x.data(), tokens * d);
  for (int64_t e = 0; e < a.experts; ++e) {
    if (s->counts[e] == 0) continue;
    s->pairs.clear();
    for (int64_t p = 0; p < tokens * a.top_k; ++p) {
      if (a.expert_ids[p] == e) s->pairs.push_back(p);
    }
    // [pair, 2 I]: gate and up, then their product in the gate's place.
    s->inner.resize(s->pairs.size() * 2 * inner);
    const int64_t count = s->pairs.size();
    s->from.resize(count), s->to.resize(count);
    for (int64_t i = 0; i < count; ++i) s->from[i] = s->x.data() + s->pairs[i] / a.top_k * d;
    for (int64_t r = 0; r < 2 * inner; r += kRows) {
      const int64_t row = e * 2 * inner + r;
      for (int64_t i = 0; i < count; ++i) s->to[i] = s->inner.data() + i * 2 * inner + r;
      Dots(a.gate_up + row * (d / 8), a.gate_up_scale + row * (d / kGroup), d, s->from.data(), s->to.data(), count,
           s->rows.data());
    }
    for (int64_t i = 0; i < count; ++i) {
      float* gate = s->inner.data() + i * 2 * inner;
      Swiglu(gate, gate + inner, inner);
      if (kWide) Interleave(gate, inner);
      s->from[i] = gate;
    }
    for (int64_t r = 0; r < d; r += kRows) {
      const int64_t row = e * d + r;
      for (int64_t i = 0; i < count; ++i) s->to[i] = a.partial + s->pairs[i] * d + r;
      Dots(a.down + row * (inner / 8), a.down_scale + row * (inner / kGroup), inner, s->from.data(), s->to.data(),
           count, s->rows.data());
    }
  }
}

template <typename T>
void Weigh(const ddtree_expert_mlp_args& a) {
  const int64_t d = a.hidden, choices = HasWork(a) ? a.top_k : 0;
  if (d == 0) return;
  for (int64_t t = 0; t < a.tokens; ++t) {
    T* out = static_cast<T*>(a.out) + t * d;
    for (int64_t i = 0; i < d; ++i) {
      float total = 0;
      for (int64_t p = t * choices; p < (t + 1) * choices; ++p) {
        if (a.expert_ids[p] < 0 || a.expert_ids[p] >= a.experts) continue;
        total += a.expert_weights[p] * a.partial[p * d + i];
      }
      if constexpr (sizeof(T) == 2) {
        out[i] = ToBf16(total);
      } else {
        out[i] = total;
      }
    }
  }
}

// The scratch is this device's own.
bool HasPartial(const ddtree_expert_mlp_args& a) { return Array(a.partial, 4, {a.tokens, a.top_k, a.hidden}); }

}  // namespace
}  // namespace ddtree

int ddtree_expert_mlp_cpu(const ddtree_expert_mlp_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  if (!ddtree::HasPartial(*a)) return DDTREE_INVALID_ARGUMENT;
  if (!ddtree::HasWork(*a)) return DDTREE_OK;
  // Grows to the largest call's size and stays: one per pool thread.
  static thread_local ddtree::Scratch scratch;
  try {
    (a->dtype == DDTREE_BF16 ? ddtree::Run<uint16_t> : ddtree::Run<float>)(*a, task, tasks, &scratch);
  } catch (const std::bad_alloc&) {
    return DDTREE_OUT_OF_MEMORY;
  } catch (const std::length_error&) {
    return DDTREE_OUT_OF_MEMORY;
  }
  return DDTREE_OK;
}

int ddtree_expert_mlp_sum_cpu(const ddtree_expert_mlp_args* a) {
  if (const int status = ddtree::Check(a); status != DDTREE_OK) return status;
  if (!ddtree::HasPartial(*a)) return DDTREE_INVALID_ARGUMENT;
  (a->dtype == DDTREE_BF16 ? ddtree::Weigh<uint16_t> : ddtree::Weigh<float>)(*a);
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(expert_mlp)
DDTREE_NO_CUDA_WORKSPACE(expert_mlp, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t)
