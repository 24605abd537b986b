// The k best logits of each row, in two launches that read the logits once.
//
// scan_rows: many blocks a row. A warp takes 1024 logits at a time and leaves the maximum of every group of 64
// consecutive logits, and each block leaves the online softmax of its share.
//
// select_rows: one block a row. The k groups that come first by (maximum descending, index ascending) hold all of the
// row's k best: if a logit lies in another group, each of those k groups has a logit that precedes it. So only those
// groups are read again, and of them only the logits that reach the weakest chosen group's maximum are kept: a few more
// than k on ordinary data. Keys (value, index) are unique, which bounds every list whatever the input: all equal,
// ascending or all NaN rows included.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include <type_traits>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/ddtree.h"

namespace {

using ddtree::ceil_div;

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kOctet = 8;                 // consecutive logits a lane loads at once
constexpr int kGroup = 64;                // logits a group: 8 lanes
constexpr int kOctets = 4;                // loads in flight a lane
constexpr int kStride = 32 * kOctet;      // logits between a lane's octets
constexpr int kTile = kStride * kOctets;  // logits a warp takes at a time
constexpr int kScanWarps = 8;
constexpr int kScanBlocks = 4096;  // enough short blocks that the last wave costs little
constexpr int kSelectThreads = 512;
constexpr int kBins = 2 * kSelectThreads;
constexpr int kSharedGroups = 4096;  // group maxima kept on chip: V to 262,144
constexpr int kMaxGroups = 2 * DDTREE_MAX_CANDIDATES;
constexpr int kMaxKept = 2048;              // logits that are sorted
constexpr int kMaxRanked = kSelectThreads;  // up to here every key is compared with every other
constexpr int64_t kMaxVocab = 1 << 22;      // a group's index takes 16 bits

// The online softmax of a part of a row. `lowest` is the least group maximum in it.
struct __align__(16) Partial {
  float max, sum, lowest, unused;
};

struct Plan {
  int64_t sweeps, splits, groups;  // tiles a warp takes, blocks a row, groups a row
};

Plan plan(int64_t rows, int64_t vocab) {
  const int64_t most = ceil_div(vocab > 0 ? vocab : 1, kTile * kScanWarps);
  const int64_t want = kScanBlocks / (rows > 0 ? rows : 1);
  const int64_t sweeps = ceil_div(most, want < 1 ? 1 : want);
  return {sweeps, ceil_div(most, sweeps), ceil_div(vocab, kGroup)};
}

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
  __device__ __forceinline__ float at(int i) const { return value[i]; }
};

// The octet at logit `first` of a row; past the vocabulary -inf.
template <typename T, bool kAligned>
__device__ __forceinline__ Octet<T> load_octet(const T* row, int first, int vocab) {
  Octet<T> octet;
  if (kAligned && first + kOctet <= vocab) {
    octet.load(row + first);
  } else {
    octet.load_some(row + first, vocab - first);
  }
  return octet;
}

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

__device__ __forceinline__ float warp_min(float x) {
  return value_of<float>(__reduce_min_sync(~0u, order<float>(x)));
}

// The warp's sum of exp(x - top), from each lane's sum relative to its own maximum.
__device__ __forceinline__ float warp_sum(float sum, float max, float top) {
  sum *= exp2_fast((max - top) * kLog2E);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(32 * kScanWarps) scan_rows(const T* __restrict__ logits, int vocab, int sweeps,
                                                             int splits, int groups, Partial* __restrict__ partials,
                                                             uint32_t* __restrict__ group_codes) {
  const int64_t row = blockIdx.x / splits;
  const int split = blockIdx.x % splits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* x = logits + row * vocab;
  uint32_t* row_groups = group_codes + row * groups;
  // -FLT_MAX, not -inf, so that differences of maxima are never NaN; a row of -inf sums to zero.
  float max = -FLT_MAX, sum = 0.0f, lowest = INFINITY;
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    const int64_t tile = (static_cast<int64_t>(split) * sweeps + sweep) * kScanWarps + warp;
    if (tile * kTile >= vocab) break;
    const int first = static_cast<int>(tile) * kTile + lane * kOctet;
    Octet<T> octet[kOctets];
    float best[kOctets];
#pragma unroll
    for (int i = 0; i < kOctets; ++i) octet[i] = load_octet<T, kAligned>(x, first + i * kStride, vocab);
    float top = max;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      octet[i].clean();
      best[i] = octet[i].max();
      top = fmaxf(top, best[i]);
    }
    float part[kOctets] = {};
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
#pragma unroll
      for (int j = 0; j < kOctet; ++j) part[i] += exp2_fast((octet[i].at(j) - top) * kLog2E);
    }
    sum = sum * exp2_fast((max - top) * kLog2E) + ((part[0] + part[1]) + (part[2] + part[3]));
    max = top;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
#pragma unroll
      for (int lanes = kGroup / kOctet / 2; lanes > 0; lanes /= 2) {
        best[i] = fmaxf(best[i], __shfl_xor_sync(~0u, best[i], lanes));
      }
      if (first + i * kStride < vocab) {
        lowest = fminf(lowest, best[i]);
        if (lane % (kGroup / kOctet) == 0) row_groups[(first + i * kStride) / kGroup] = order<T>(best[i]);
      }
    }
  }
  float top = warp_max(max);
  sum = warp_sum(sum, max, top), lowest = warp_min(lowest);
  __shared__ Partial shared[kScanWarps];
  if (lane == 0) shared[warp] = {top, sum, lowest, 0.0f};
  __syncthreads();
  if (warp == 0) {
    const Partial mine = lane < kScanWarps ? shared[lane] : Partial{-FLT_MAX, 0.0f, INFINITY, 0.0f};
    top = warp_max(mine.max);
    sum = warp_sum(mine.sum, mine.max, top), lowest = warp_min(mine.lowest);
    if (lane == 0) partials[blockIdx.x] = {top, sum, lowest, 0.0f};
  }
}

struct SelectShared {
  uint32_t group_codes[kSharedGroups];
  uint64_t kept[kMaxKept];
  uint32_t histogram[kBins];
  uint32_t groups[kMaxGroups];
  uint32_t warp_total[kSelectThreads / 32];
  uint32_t num_groups, num_kept;
  uint32_t bin, above, inside;
};

// A key that at least k and at most `most` of the n unique keys reach, for k <= most and k <= n. Keys lie in lo..hi; a
// key below lo is ignored. Spreads the range over the bins and narrows it to the bin of the k-th key until few enough
// remain. The histogram is zero before and after.
template <typename Key, typename KeyAt>
__device__ Key reach(SelectShared& shared, int n, uint32_t k, uint32_t most, Key lo, Key hi, KeyAt key_at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t taken = 0;  // keys above hi
  while (true) {
    const int bits = 64 - __clzll(static_cast<uint64_t>(hi - lo));
    const int shift = bits > 10 ? bits - 10 : 0;
    static_assert(kBins == 1 << 10, "a bin index has ten bits");
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      const Key key = key_at(i);
      if (key >= lo && key <= hi) atomicAdd(&shared.histogram[(key - lo) >> shift], 1u);
    }
    __syncthreads();
    // Counts from the top bin down: each thread has two neighbouring bins.
    const int upper = kBins - 1 - 2 * threadIdx.x;
    const uint32_t in_upper = shared.histogram[upper], in_lower = shared.histogram[upper - 1];
    shared.histogram[upper] = shared.histogram[upper - 1] = 0;
    uint32_t through = in_upper + in_lower;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, through, lanes);
      if (lane >= lanes) through += other;
    }
    if (lane == 31) shared.warp_total[warp] = through;
    __syncthreads();
    through += __reduce_add_sync(~0u, lane < warp ? shared.warp_total[lane] : 0u);
    const uint32_t need = k - taken, before = through - in_upper - in_lower;
    if (before < need && need <= through) {
      const bool in_first = need <= before + in_upper;
      shared.bin = in_first ? upper : upper - 1;
      shared.above = in_first ? before : before + in_upper;
      shared.inside = in_first ? in_upper : in_lower;
    }
    __syncthreads();
    lo += static_cast<Key>(shared.bin) << shift;
    if (shift == 0 || taken + shared.above + shared.inside <= most) return lo;
    hi = lo + ((static_cast<Key>(1) << shift) - 1);
    taken += shared.above;
  }
}

// Sorts kept[0, n) descending; n a power of two.
__device__ void sort_kept(uint64_t* kept, int n) {
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

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kSelectThreads)
    select_rows(const T* __restrict__ logits, int vocab, int k, int splits, int groups,
                const Partial* __restrict__ partials, const uint32_t* __restrict__ group_codes,
                float* __restrict__ log_probs, int32_t* __restrict__ token_ids) {
  __shared__ SelectShared shared;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const T* x = logits + row * vocab;
  const uint32_t* row_groups = group_codes + row * groups;
  // This lane's part of the row's softmax; asked for before the groups and used after, to wait once for both.
  const Partial nothing{-FLT_MAX, 0.0f, INFINITY, 0.0f};
  Partial part = lane < splits ? partials[row * splits + lane] : nothing;
#pragma unroll 8
  for (int i = threadIdx.x; i < min(groups, kSharedGroups); i += kSelectThreads) shared.group_codes[i] = row_groups[i];
  float max = part.max, sum = part.sum, lowest = part.lowest;
  for (int i = lane + 32; i < splits; i += 32) {
    part = partials[row * splits + i];
    const float top = fmaxf(max, part.max);
    sum = sum * exp2_fast((max - top) * kLog2E) + part.sum * exp2_fast((part.max - top) * kLog2E);
    max = top;
    lowest = fminf(lowest, part.lowest);
  }
  shared.histogram[2 * threadIdx.x] = shared.histogram[2 * threadIdx.x + 1] = 0;
  if (threadIdx.x == 0) shared.num_groups = shared.num_kept = 0;
  const float row_max = warp_max(max), row_lowest = warp_min(lowest);
  __syncthreads();

  // 32 bits hold a bf16 code and the group's index.
  using GroupKey = typename std::conditional<sizeof(T) == 2, uint32_t, uint64_t>::type;
  const int index_bits = 32 - __clz(groups - 1);
  const auto group_key = [&](int g) {
    const GroupKey code = g < kSharedGroups ? shared.group_codes[g] : row_groups[g];
    return static_cast<GroupKey>(code << index_bits | static_cast<uint32_t>(groups - 1 - g));
  };
  GroupKey group_floor = 0;
  if (groups > k) {
    const GroupKey highest = order<T>(row_max);
    group_floor = reach<GroupKey>(shared, groups, k, 2 * k, static_cast<GroupKey>(order<T>(row_lowest)) << index_bits,
                                  (highest << index_bits) + ((static_cast<GroupKey>(1) << index_bits) - 1), group_key);
  }
#pragma unroll 4
  for (int g = threadIdx.x; g < groups; g += kSelectThreads) {
    if (group_key(g) >= group_floor) shared.groups[atomicAdd(&shared.num_groups, 1u)] = g;
  }
  __syncthreads();

  const int num_groups = shared.num_groups;
  constexpr int kGroupOctets = kGroup / kOctet;
  const auto element_key = [](float value, int id) {
    return static_cast<uint64_t>(order<T>(value)) << 32 | ~static_cast<uint32_t>(id);
  };
  const auto keep_octet = [&](Octet<T>& octet, int first, uint64_t floor) {
    if (first >= vocab) return;
    octet.clean();
    const float least = value_of<T>(::max(static_cast<uint32_t>(floor >> 32), order<T>(-INFINITY)));
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      if (!(octet.at(j) >= least)) continue;
      const uint64_t key = element_key(octet.at(j), first + j);
      if (key >= floor && first + j < vocab) {
        const uint32_t at = atomicAdd(&shared.num_kept, 1u);
        if (at < kMaxKept) shared.kept[at] = key;
      }
    }
  };
  const auto keep_from = [&](uint64_t floor) {
    const auto first_of = [&](int i) {
      return i < num_groups * kGroupOctets
                 ? static_cast<int>(shared.groups[i / kGroupOctets]) * kGroup + i % kGroupOctets * kOctet
                 : vocab;
    };
    for (int i = threadIdx.x; i < num_groups * kGroupOctets; i += 2 * kSelectThreads) {
      const int first = first_of(i), second = first_of(i + kSelectThreads);
      Octet<T> a = load_octet<T, kAligned>(x, first, vocab), b = load_octet<T, kAligned>(x, second, vocab);
      keep_octet(a, first, floor);
      keep_octet(b, second, floor);
    }
    __syncthreads();
  };
  const uint64_t value_floor = static_cast<uint64_t>(group_floor >> index_bits) << 32;
  keep_from(value_floor);
  if (shared.num_kept > kMaxKept) {
    const auto key_at = [&](int i) {
      const int id = shared.groups[i / kGroup] * kGroup + i % kGroup;
      return id < vocab ? element_key(fmaxf(static_cast<float>(x[id]), -INFINITY), id) : 0ull;
    };
    const uint64_t floor = reach<uint64_t>(shared, num_groups * kGroup, k, kMaxKept, value_floor | 1u,
                                           static_cast<uint64_t>(order<T>(row_max)) << 32 | ~0u, key_at);
    __syncthreads();
    if (threadIdx.x == 0) shared.num_kept = 0;
    __syncthreads();
    keep_from(floor);
  }

  sum = warp_sum(sum, max, row_max);
  // Rounded before it is subtracted: equal steps between logits stay equal, and so do the sums of paths.
  const float normaliser = sum > 0.0f ? row_max + logf(sum) : -INFINITY;  // NaN where the row has +inf
  const bool finite = isfinite(normaliser);
  const auto write = [&](int rank, uint64_t key) {
    const float value = value_of<T>(static_cast<uint32_t>(key >> 32));
    log_probs[row * k + rank] = finite ? fminf(value - normaliser, 0.0f) : -INFINITY;
    token_ids[row * k + rank] = static_cast<int32_t>(~static_cast<uint32_t>(key));
  };
  const int kept = shared.num_kept;
  if (kept <= kMaxRanked) {
    // A key's place is the number of keys above it. The threads that count for one key are lanes of one warp.
    int bits = 5;
    while (kSelectThreads >> bits < kept) --bits;
    const int counters = 1 << bits, counter = threadIdx.x & (counters - 1), mine = threadIdx.x >> bits;
    const uint64_t key = mine < kept ? shared.kept[mine] : 0;
    int rank = 0;
#pragma unroll 8
    for (int i = counter; i < kept; i += counters) rank += shared.kept[i] > key;
    for (int lanes = counters / 2; lanes > 0; lanes /= 2) rank += __shfl_xor_sync(~0u, rank, lanes);
    if (mine < kept && counter == 0 && rank < k) write(rank, key);
  } else {
    int size = 2 * kMaxRanked;
    while (size < kept) size *= 2;
    for (int i = kept + threadIdx.x; i < size; i += kSelectThreads) shared.kept[i] = 0;
    __syncthreads();
    sort_kept(shared.kept, size);
    for (int i = threadIdx.x; i < k; i += kSelectThreads) write(i, shared.kept[i]);
  }
}

template <typename T, bool kAligned>
int launch(const ddtree_draft_topk_args& args, cudaStream_t stream) {
  const Plan p = plan(args.rows, args.vocab);
  Partial* partials = static_cast<Partial*>(args.workspace);
  uint32_t* group_codes = reinterpret_cast<uint32_t*>(partials + args.rows * p.splits);
  const T* logits = static_cast<const T*>(args.logits);
  const int vocab = static_cast<int>(args.vocab), groups = static_cast<int>(p.groups);
  const int splits = static_cast<int>(p.splits);
  scan_rows<T, kAligned><<<static_cast<unsigned>(args.rows * p.splits), 32 * kScanWarps, 0, stream>>>(
      logits, vocab, static_cast<int>(p.sweeps), splits, groups, partials, group_codes);
  select_rows<T, kAligned><<<static_cast<unsigned>(args.rows), kSelectThreads, 0, stream>>>(
      logits, vocab, static_cast<int>(args.k), splits, groups, partials, group_codes, args.log_probs, args.token_ids);
  return ddtree::launch_status();
}

template <typename T>
int launch_typed(const ddtree_draft_topk_args& args, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 && args.vocab * sizeof(T) % 16 == 0;
  return aligned ? launch<T, true>(args, stream) : launch<T, false>(args, stream);
}

// Whether the kernels serve these sizes. A row has one block where rows are many: a grid never has more than
// max(rows, kScanBlocks).
bool served(int64_t rows, int64_t vocab, int64_t k) {
  return ddtree::DraftTopkSizes(vocab, k) && vocab <= kMaxVocab && ddtree::Between(0, rows, INT32_MAX);
}

}  // namespace

size_t ddtree_draft_topk_workspace(int64_t rows, int64_t vocab, int64_t k) {
  if (!served(rows, vocab, k)) return 0;
  const Plan p = plan(rows, vocab);
  return static_cast<size_t>(rows) * (p.splits * sizeof(Partial) + p.groups * sizeof(uint32_t));
}

int ddtree_draft_topk_cuda(const ddtree_draft_topk_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  if (!served(args->rows, args->vocab, args->k)) return DDTREE_INVALID_ARGUMENT;
  if (args->rows == 0) return DDTREE_OK;
  if (!ddtree::has_workspace(args->workspace, args->workspace_bytes,
                             ddtree_draft_topk_workspace(args->rows, args->vocab, args->k))) {
    return DDTREE_INVALID_ARGUMENT;
  }
  if (args->dtype == DDTREE_BF16) return launch_typed<__nv_bfloat16>(*args, static_cast<cudaStream_t>(stream));
  return launch_typed<float>(*args, static_cast<cudaStream_t>(stream));
}
