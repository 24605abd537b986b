// The k best logits of one row, by one block, from the maxima of its groups of 64 consecutive logits.
//
// The k groups that come first by (maximum descending, index ascending) hold all of the row's k best: if a logit lies
// in another group, each of those k groups has a logit that precedes it. So only groups above a floor that at least k
// reach are read again, and of them only the logits that reach the floor's value are kept: a few more than k on
// ordinary data. Keys (value, index) are unique, which bounds every list whatever the input: all equal, ascending or
// all NaN rows included.
//
// Nothing else of the row is left to do meanwhile, and instructions take longer here than loads: what all warps do
// alike is counted once a warp, so that threads without work skip it, and rare cases have loops of their own.
#ifndef DDTREE_FFI_CUDA_DRAFT_SELECT_H_
#define DDTREE_FFI_CUDA_DRAFT_SELECT_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

namespace ddtree {
namespace draft {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kOctet = 8;   // consecutive logits that are loaded at once
constexpr int kGroup = 64;  // logits a group
constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kHeld = 8;  // groups whose keys a thread keeps: all to V 262,144
constexpr int kBins = 256;
constexpr int kLaneBins = kBins / 32;
constexpr int kMaxGroups = 1024;            // that are read again
constexpr int kMaxKept = 2048;              // logits that are sorted
constexpr int kMaxRanked = kSelectThreads;  // up to here every key is compared with every other

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Eight consecutive logits, NaN replaced by -inf.
template <typename T>
struct Octet;

template <>
struct Octet<__nv_bfloat16> {
  uint32_t word[4];

  __device__ __forceinline__ void load(const __nv_bfloat16* p) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  }
  __device__ __forceinline__ void load_some(const __nv_bfloat16* p, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = 2 * i < count ? __ldg(reinterpret_cast<const uint16_t*>(p) + 2 * i) : 0xff80u;
      const uint32_t high = 2 * i + 1 < count ? __ldg(reinterpret_cast<const uint16_t*>(p) + 2 * i + 1) : 0xff80u;
      word[i] = low | high << 16;
    }
  }
  static __device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {
    __nv_bfloat162 x, y;
    memcpy(&x, &a, 4), memcpy(&y, &b, 4);
    x = __hmax2(x, y);  // the number when one operand is NaN
    memcpy(&a, &x, 4);
    return a;
  }
  __device__ __forceinline__ void clean() {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = max2(word[i], 0xff80ff80u);
  }
  __device__ __forceinline__ float max() const {
    const uint32_t m = max2(max2(word[0], word[1]), max2(word[2], word[3]));
    return fmaxf(__uint_as_float(m << 16), __uint_as_float(m & 0xffff0000u));
  }
  // Bit i: the i-th is at least this bf16 number.
  __device__ __forceinline__ uint32_t reaching(float least) const {
    const uint32_t bits = __float_as_uint(least), both = bits | bits >> 16;
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __nv_bfloat162 x, y;
      memcpy(&x, &word[i], 4), memcpy(&y, &both, 4);
      mask |= __hge2_mask(x, y) & (1u << 2 * i | 1u << (2 * i + 17));
    }
    return (mask | mask >> 16) & 0xff;
  }
  __device__ __forceinline__ float at(int i) const {
    return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
  }
};

template <>
struct Octet<float> {
  float value[8];

  __device__ __forceinline__ void load(const float* p) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(p)), b = __ldg(reinterpret_cast<const float4*>(p) + 1);
    value[0] = a.x, value[1] = a.y, value[2] = a.z, value[3] = a.w;
    value[4] = b.x, value[5] = b.y, value[6] = b.z, value[7] = b.w;
  }
  __device__ __forceinline__ void load_some(const float* p, int count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = i < count ? __ldg(p + i) : -INFINITY;
  }
  __device__ __forceinline__ void clean() {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = fmaxf(value[i], -INFINITY);
  }
  __device__ __forceinline__ float max() const {
    float m = value[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) m = fmaxf(m, value[i]);
    return m;
  }
  __device__ __forceinline__ uint32_t reaching(float least) const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) mask |= value[i] >= least ? 1u << i : 0;
    return mask;
  }
  __device__ __forceinline__ float at(int i) const { return value[i]; }
};

// Unsigned codes in the order of the values, -0.0 equal to 0.0: 16 bits for bf16, 32 for float32; above 0 for any
// number.
template <typename T>
__device__ __forceinline__ uint32_t order(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);
  bits ^= static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return sizeof(T) == 2 ? bits >> 16 : bits;
}

template <typename T>
__device__ __forceinline__ float value_of(uint32_t code) {
  uint32_t bits = sizeof(T) == 2 ? code << 16 : code;
  bits = bits & 0x80000000u ? bits ^ 0x80000000u : ~bits;
  return __uint_as_float(sizeof(T) == 2 ? bits & 0xffff0000u : bits);
}

__device__ __forceinline__ float warp_max(float x) {
  return value_of<float>(__reduce_max_sync(~0u, order<float>(x)));
}

// The warp's sum of exp(x - top), from each lane's sum relative to its own maximum.
__device__ __forceinline__ float warp_sum(float sum, float max, float top) {
  sum *= exp2_fast((max - top) * kLog2E);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}

struct SelectShared {
  alignas(16) uint64_t kept[kMaxKept];
  alignas(16) uint32_t histogram[kBins];
  uint2 warp_codes[kSelectWarps];
  uint16_t groups[kMaxGroups];
  uint32_t num_groups, num_kept;
  float normaliser;

  __device__ __forceinline__ void clear() {
    kept[threadIdx.x] = 0;
    if (threadIdx.x < kBins) histogram[threadIdx.x] = 0;
    if (threadIdx.x == 0) num_groups = num_kept = 0;
  }
};

// A key that at least k and at most `most` of the n unique keys reach, for k <= most and k <= n. Keys lie in lo..hi; a
// key below lo is ignored. Spreads the range over the bins and narrows it to the bin of the k-th key until few enough
// remain. `clean` says whether the histogram is zero.
template <typename Key, typename KeyAt>
__device__ __forceinline__ Key reach(SelectShared& shared, int n, uint32_t k, uint32_t most, Key lo, Key hi, bool clean,
                                     KeyAt key_at) {
  const int lane = threadIdx.x % 32;
  uint32_t taken = 0;  // keys above hi
  while (true) {
    if (!clean) {
      __syncthreads();
      if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
      __syncthreads();
    }
    clean = false;
    const int bits = 64 - __clzll(static_cast<uint64_t>(hi - lo));
    const int shift = bits > 8 ? bits - 8 : 0;
    static_assert(kBins == 1 << 8, "a bin index has eight bits");
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      const Key key = key_at(i);
      if (key >= lo && key <= hi) atomicAdd(&shared.histogram[(key - lo) >> shift], 1u);
    }
    __syncthreads();
    // Counts from the top bin down, in every warp: a lane has eight neighbouring bins.
    const int lowest_bin = kBins - kLaneBins - lane * kLaneBins;
    uint32_t through[kLaneBins];  // keys in this bin and above
#pragma unroll
    for (int i = 0; i < kLaneBins; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared.histogram[lowest_bin + i]);
      through[i] = four.x, through[i + 1] = four.y, through[i + 2] = four.z, through[i + 3] = four.w;
    }
#pragma unroll
    for (int i = kLaneBins - 1; i > 0; --i) through[i - 1] += through[i];
    uint32_t sum = through[0];
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, lanes);
      if (lane >= lanes) sum += other;
    }
    const uint32_t need = k - taken, before = sum - through[0];
    uint32_t bin = lowest_bin + kLaneBins - 1, above = before, reached = before + through[kLaneBins - 1];
#pragma unroll
    for (int i = kLaneBins - 1; i > 0; --i) {
      if (before + through[i] >= need) continue;
      bin = lowest_bin + i - 1, above = before + through[i], reached = before + through[i - 1];
    }
    const int owner = __ffs(__ballot_sync(~0u, sum >= need)) - 1;
    lo += static_cast<Key>(__shfl_sync(~0u, bin, owner)) << shift;
    if (shift == 0 || taken + __shfl_sync(~0u, reached, owner) <= most) return lo;
    hi = lo + ((static_cast<Key>(1) << shift) - 1);
    taken += __shfl_sync(~0u, above, owner);
  }
}

// Sorts kept[0, n) descending; n a power of two.
__device__ inline void sort_kept(uint64_t* kept, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < n / 2; i += kSelectThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64_t a = kept[low], b = kept[high];
        if (((low & size) == 0) == (a < b)) kept[low] = b, kept[high] = a;
      }
      __syncthreads();
    }
  }
}

// Rounded before it is subtracted: equal steps between logits stay equal, and so do the sums of paths.
__device__ __forceinline__ float normaliser_of(float max, float sum) {
  return sum > 0.0f ? max + logf(sum) : -INFINITY;  // NaN where the row has +inf
}

// The k best of one row by one block of kSelectThreads. `code_at` gives a group's code, `row_normaliser` the row's
// normaliser to the warp that calls it. `shared` has been cleared, which the first barrier here makes known.
template <typename T, bool kAligned, typename CodeAt, typename Normaliser>
__device__ __forceinline__ void select(SelectShared& shared, const T* x, int vocab, int k, int groups, CodeAt code_at,
                                       Normaliser row_normaliser, float* log_probs, int32_t* token_ids) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  // 32 bits hold a bf16 code and the group's index. Every key is above 0.
  using GroupKey = typename std::conditional<sizeof(T) == 2, uint32_t, uint64_t>::type;
  const int index_bits = 32 - __clz(groups - 1);
  const auto group_key = [&](int g) {
    return static_cast<GroupKey>(code_at(g)) << index_bits | static_cast<GroupKey>(groups - 1 - g);
  };
  GroupKey keys[kHeld], best = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    keys[i] = 0;
    if (i * kSelectThreads >= groups) continue;
    if (thread + i * kSelectThreads < groups) keys[i] = group_key(thread + i * kSelectThreads);
    best = ::max(best, keys[i]);
  }
  for (int g = thread + kHeld * kSelectThreads; g < groups; g += kSelectThreads) best = ::max(best, group_key(g));

  const uint32_t code = static_cast<uint32_t>(best >> index_bits);
  uint32_t lowest = __reduce_min_sync(~0u, best > 0 ? code : ~0u), highest = __reduce_max_sync(~0u, code);
  if (lane == 0) shared.warp_codes[warp] = {lowest, highest};
  __syncthreads();
  const uint2 codes = shared.warp_codes[lane % kSelectWarps];
  lowest = __reduce_min_sync(~0u, codes.x), highest = __reduce_max_sync(~0u, codes.y);

  // A floor for groups: the best groups of k threads or a few more reach it, so at least k groups do.
  GroupKey floor = 1;
  const GroupKey top = (static_cast<GroupKey>(highest + 1) << index_bits) - 1;
  if (groups > k) {
    floor = reach<GroupKey>(shared, kSelectThreads, k, k + k / 8 + 16, static_cast<GroupKey>(lowest) << index_bits, top,
                            true, [&](int) { return best; });
  }
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) mine |= keys[i] >= floor ? 1u << i : 0;
  if (mine > 0) {
    uint32_t at = atomicAdd(&shared.num_groups, __popc(mine));
    for (; mine > 0; mine &= mine - 1, ++at) {
      if (at < kMaxGroups) shared.groups[at] = thread + (__ffs(mine) - 1) * kSelectThreads;
    }
  }
  const auto list_from = [&](int first) {
    for (int g = first + thread; g < groups; g += kSelectThreads) {
      if (group_key(g) < floor) continue;
      const uint32_t at = atomicAdd(&shared.num_groups, 1u);
      if (at < kMaxGroups) shared.groups[at] = g;
    }
  };
  list_from(kHeld * kSelectThreads);
  __syncthreads();
  if (shared.num_groups > kMaxGroups) {
    floor = reach<GroupKey>(shared, groups, k, kMaxGroups, floor, top, false, group_key);
    __syncthreads();
    if (thread == 0) shared.num_groups = 0;
    __syncthreads();
    list_from(0);
    __syncthreads();
  }

  const int num_groups = shared.num_groups;
  const auto element_key = [](float value, int id) {
    return static_cast<uint64_t>(order<T>(value)) << 32 | ~static_cast<uint32_t>(id);
  };
  const uint32_t floor_code = static_cast<uint32_t>(floor >> index_bits);
  const float least = value_of<T>(::max(floor_code, order<T>(-INFINITY)));
  if (warp == kSelectWarps - 1) {
    const float normaliser = row_normaliser();
    if (lane == 0) shared.normaliser = normaliser;
  }
  constexpr int kLanes = kGroup / (2 * kOctet);  // that read a group
  for (int i = thread; i < num_groups * kLanes; i += kSelectThreads) {
    const int first = shared.groups[i / kLanes] * kGroup + i % kLanes * 2 * kOctet;
    Octet<T> low, high;
    if (kAligned && first + 2 * kOctet <= vocab) {
      low.load(x + first), high.load(x + first + kOctet);
    } else {
      low.load_some(x + first, vocab - first), high.load_some(x + first + kOctet, vocab - first - kOctet);
    }
    low.clean(), high.clean();
    uint32_t these = low.reaching(least) | high.reaching(least) << kOctet;
    if (first + 2 * kOctet > vocab) these &= (1u << ::max(vocab - first, 0)) - 1;
    if (these == 0) continue;
    uint32_t at = atomicAdd(&shared.num_kept, __popc(these));
    for (; these > 0; these &= these - 1, ++at) {
      const int id = first + __ffs(these) - 1;
      if (at < kMaxKept) shared.kept[at] = element_key(fmaxf(static_cast<float>(x[id]), -INFINITY), id);
    }
  }
  __syncthreads();
  if (shared.num_kept > kMaxKept) {
    const auto key_at = [&](int i) {
      const int id = shared.groups[i / kGroup] * kGroup + i % kGroup;
      return id < vocab ? element_key(fmaxf(static_cast<float>(x[id]), -INFINITY), id) : 0ull;
    };
    const uint64_t least_key =
        reach<uint64_t>(shared, num_groups * kGroup, k, kMaxKept, static_cast<uint64_t>(floor_code) << 32 | 1u,
                        static_cast<uint64_t>(highest) << 32 | ~0u, false, key_at);
    __syncthreads();
    if (thread == 0) shared.num_kept = 0;
    shared.kept[thread] = 0;
    __syncthreads();
    for (int i = thread; i < num_groups * kGroup; i += kSelectThreads) {
      if (const uint64_t key = key_at(i); key >= least_key) shared.kept[atomicAdd(&shared.num_kept, 1u)] = key;
    }
    __syncthreads();
  }

  const float normaliser = shared.normaliser;
  const bool finite = isfinite(normaliser);
  const auto write = [&](int rank, uint64_t key) {
    const float value = value_of<T>(static_cast<uint32_t>(key >> 32));
    log_probs[rank] = finite ? fminf(value - normaliser, 0.0f) : -INFINITY;
    token_ids[rank] = static_cast<int32_t>(~static_cast<uint32_t>(key));
  };
  const int kept = shared.num_kept;
  if (kept <= kMaxRanked) {
    // A key's place is the number of keys above it. The threads that count for one key are lanes of one warp.
    const int bits = kept > 16 ? __clz(kept - 1) - __clz(kSelectThreads - 1) : 5;
    const int counters = 1 << bits, counter = thread & (counters - 1), at = thread >> bits;
    if (warp * 32 >> bits < kept) {
      const uint64_t key = shared.kept[at];
      int rank = 0;
#pragma unroll 4
      for (int i = 2 * counter; i < kept; i += 2 * counters) {
        const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(&shared.kept[i]);
        rank += (pair.x > key) + (pair.y > key);
      }
      for (int lanes = counters / 2; lanes > 0; lanes /= 2) rank += __shfl_xor_sync(~0u, rank, lanes);
      if (at < kept && counter == 0 && rank < k) write(rank, key);
    }
  } else {
    int size = 2 * kMaxRanked;
    while (size < kept) size *= 2;
    for (int i = kept + thread; i < size; i += kSelectThreads) shared.kept[i] = 0;
    __syncthreads();
    sort_kept(shared.kept, size);
    for (int i = thread; i < k; i += kSelectThreads) write(i, shared.kept[i]);
  }
}

}  // namespace draft
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_DRAFT_SELECT_H_
