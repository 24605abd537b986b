// The k best logits of each row, with log-probabilities, in one read of the logits.
//
// Where rows are many, in two launches. scan_rows: many blocks per row; a warp takes 1024 logits at a time and leaves
// the maximum of every group of 64 consecutive logits, and each block leaves the online softmax of its share.
// select_rows: one block per row selects (draft_select.h).
//
// Where rows are few, the second launch and its wait for what the first has written would be most of the time. On
// Hopper one launch does both then: topk_in_cluster, a cluster of blocks per row.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <float.h>

#include <atomic>

#include "ffi/arguments.h"
#include "ffi/cuda/cluster.h"
#include "ffi/cuda/draft_select.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/sm90.h"
#include "ffi/ddtree.h"

namespace {

using namespace ddtree::draft;
using ddtree::ceil_div;
namespace cluster = ddtree::cluster;
namespace sm90 = ddtree::sm90;

constexpr int kOctets = 4;                // loads in flight a lane
constexpr int kStride = 32 * kOctet;      // logits between a lane's octets
constexpr int kTile = kStride * kOctets;  // logits a warp takes at a time
constexpr int kScanWarps = 8;
constexpr int kScanBlocks = 4096;       // enough short blocks that the last wave costs little
constexpr int64_t kMaxVocab = 1 << 22;  // a group's index takes 16 bits

// A cluster's first block keeps a row's codes in shared memory, and each of its threads their keys in registers.
constexpr int kClusterGroups = kHeld * kSelectThreads;
// On an H200 clusters of 16 blocks are the fastest while all blocks have SMs of their own, then of 8 while all
// fit at two blocks an SM; with more rows two launches are.
constexpr int kLargeClusterBlocks = 16, kLargeClusterRows = 7;
constexpr int kSmallClusterBlocks = 8, kSmallClusterRows = 32;

// The online softmax of a split of a row: its maximum, and the sum relative to it.
struct __align__(8) Partial {
  float max, sum;
};

// Of no logits. -FLT_MAX, not -inf, so that differences of maxima are never NaN; a row of -inf sums to zero.
__device__ __forceinline__ Partial no_logits() { return {-FLT_MAX, 0.0f}; }

struct Plan {
  int64_t sweeps, splits, groups;  // tiles that a warp takes, blocks per row, groups per row
};

Plan plan(int64_t rows, int64_t vocab) {
  const int64_t most = ceil_div(vocab > 0 ? vocab : 1, kTile * kScanWarps);
  const int64_t want = kScanBlocks / (rows > 0 ? rows : 1);
  const int64_t sweeps = ceil_div(most, want < 1 ? 1 : want);
  return {.sweeps = sweeps, .splits = ceil_div(most, sweeps), .groups = ceil_div(vocab, kGroup)};
}

// The octets of a tile that a lane holds.
template <typename T>
struct TileLane {
  Octet<T> octet[kOctets];

  template <bool kAligned>
  __device__ __forceinline__ void load(const T* row, int tile, int vocab) {
    const int first = tile * kTile + threadIdx.x % 32 * kOctet;
    if (kAligned && (tile + 1) * kTile <= vocab) {
#pragma unroll
      for (int i = 0; i < kOctets; ++i) octet[i].load(row + first + i * kStride);
    } else {
#pragma unroll
      for (int i = 0; i < kOctets; ++i) octet[i].load_some(row + first + i * kStride, vocab - first - i * kStride);
    }
  }

  // Replaces NaN, raises `top` to the lane's maximum and returns the code of a group of the tile: see group().
  __device__ __forceinline__ uint32_t clean(float& top) {
    float best[kOctets];
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      octet[i].clean();
      best[i] = octet[i].max();
      top = fmaxf(top, best[i]);
    }
    // Eight lanes have a group's octets. In each step a lane gives away the half that it does not go on with.
    static_assert(kOctets == 4 && kGroup == 8 * kOctet, "lanes i and i + 4 of eight end with their i-th octets");
#pragma unroll
    for (int i = 0; i < 4; ++i) best[i] = fmaxf(best[i], __shfl_xor_sync(~0u, best[i], 4));
#pragma unroll
    for (int lanes = 2; lanes > 0; lanes /= 2) {
      const bool upper = threadIdx.x & lanes;
#pragma unroll
      for (int i = 0; i < lanes; ++i) {
        const float other = __shfl_xor_sync(~0u, upper ? best[i] : best[i + lanes], lanes);
        best[i] = fmaxf(upper ? best[i + lanes] : best[i], other);
      }
    }
    return order<T>(best[0]);
  }

  // The group whose code clean() returns, or -1 where another lane has it or it lies past the vocabulary.
  static __device__ __forceinline__ int group(int tile, int groups) {
    const int lane = threadIdx.x % 32, group = tile * (kTile / kGroup) + lane % 8 * 4 + lane / 8;
    return lane % 8 < 4 && group < groups ? group : -1;
  }

  __device__ __forceinline__ void add_to(Partial& partial, float top) const {
    float part[kOctets] = {};
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
#pragma unroll
      for (int j = 0; j < kOctet; ++j) part[i] += exp2_fast((octet[i].at(j) - top) * kLog2E);
    }
    partial.sum *= exp2_fast((partial.max - top) * kLog2E);
    partial.sum += (part[0] + part[1]) + (part[2] + part[3]);
    partial.max = top;
  }
};

__device__ __forceinline__ Partial warp_total(Partial lane) {
  const float top = warp_max(lane.max);
  return {top, warp_sum(lane.sum, lane.max, top)};
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
  Partial partial = no_logits();
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    const int tile = (split * sweeps + sweep) * kScanWarps + warp;
    if (tile * kTile >= vocab) break;
    TileLane<T> held;
    held.template load<kAligned>(x, tile, vocab);
    float top = partial.max;
    const uint32_t code = held.clean(top);
    if (const int group = held.group(tile, groups); group >= 0) row_groups[group] = code;
    held.add_to(partial, top);
  }
  partial = warp_total(partial);
  __shared__ Partial shared[kScanWarps];
  if (lane == 0) shared[warp] = partial;
  __syncthreads();
  if (warp == 0) {
    partial = warp_total(lane < kScanWarps ? shared[lane] : no_logits());
    if (lane == 0) partials[blockIdx.x] = partial;
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kSelectThreads, 2)
    select_rows(const T* __restrict__ logits, int vocab, int k, int splits, int groups,
                const Partial* __restrict__ partials, const uint32_t* __restrict__ group_codes,
                float* __restrict__ log_probs, int32_t* __restrict__ token_ids) {
  __shared__ SelectShared shared;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const uint32_t* row_groups = group_codes + row * groups;
  // A lane's split of the row's softmax; asked for before the groups and used after, to wait once for both.
  Partial part = lane < splits ? partials[row * splits + lane] : no_logits();
  const auto normaliser = [&] {
    for (int i = lane + 32; i < splits; i += 32) {
      const Partial more = partials[row * splits + i];
      const float top = fmaxf(part.max, more.max);
      part.sum = part.sum * exp2_fast((part.max - top) * kLog2E) + more.sum * exp2_fast((more.max - top) * kLog2E);
      part.max = top;
    }
    const Partial total = warp_total(part);
    return normaliser_of(total.max, total.sum);
  };
  shared.clear();
  select<T, kAligned>(shared, logits + row * vocab, vocab, k, groups, [&](int g) { return row_groups[g]; }, normaliser,
                      log_probs + row * k, token_ids + row * k);
}

template <int kBlocks>
struct ClusterShared {
  static constexpr int kScanners = (kBlocks - 1) * kSelectWarps;
  SelectShared select;
  uint32_t group_codes[kClusterGroups];
  Partial partials[kScanners];
  uint64_t codes_here, partials_here;
};

// As `kernel<<<>>>` alone launches it; an error where the compiler's target has no clusters.
#if __CUDA_ARCH__ == 900
#define DDTREE_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define DDTREE_CLUSTER_OF(blocks)
#endif

// The warps of all blocks but the first scan, and what they find goes straight to the shared memory of the first, which
// selects: the maxima as soon as they are known, while the sums are still being formed. The first block scans nothing,
// so that no sums hold it up.
template <typename T, bool kAligned, int kBlocks>
__global__ void DDTREE_CLUSTER_OF(kBlocks) __launch_bounds__(kSelectThreads, 2)
    topk_in_cluster(const T* __restrict__ logits, int vocab, int k, int groups, float* __restrict__ log_probs,
                    int32_t* __restrict__ token_ids) {
#if __CUDA_ARCH__ == 900
  constexpr int kScanners = ClusterShared<kBlocks>::kScanners;
  __shared__ ClusterShared<kBlocks> shared;
  const int block = blockIdx.x % kBlocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x / kBlocks;
  const T* x = logits + row * vocab;
  const int tiles = (vocab + kTile - 1) / kTile;
  if (block > 0) {
    const int scanner = warp * (kBlocks - 1) + block - 1;
    cluster::arrive_relaxed();
    if (scanner >= tiles) cluster::wait();
    Partial partial = no_logits();
    for (int tile = scanner; tile < tiles; tile += kScanners) {
      TileLane<T> held;
      held.template load<kAligned>(x, tile, vocab);
      if (tile == scanner) cluster::wait();  // the first block has its barriers
      float top = partial.max;
      const uint32_t code = held.clean(top);
      const int group = held.group(tile, groups);
      if (group >= 0) cluster::send(&shared.group_codes[group], code, &shared.codes_here);
      held.add_to(partial, top);
    }
    partial = warp_total(partial);
    if (lane == 0 && scanner < tiles) {
      cluster::send(&shared.partials[scanner], partial.max, partial.sum, &shared.partials_here);
    }
    return;
  }

  const int scanners = min(tiles, kScanners);
  if (threadIdx.x == 0) {
    sm90::init_barrier(&shared.codes_here, 1);
    sm90::init_barrier(&shared.partials_here, 1);
    sm90::fence_barrier_init();
    sm90::arrive_expecting(&shared.codes_here, groups * sizeof(uint32_t));
    sm90::arrive_expecting(&shared.partials_here, scanners * sizeof(Partial));
  }
  __syncwarp();
  cluster::arrive_relaxed();
  shared.select.clear();
  __syncthreads();
  cluster::wait();
  cluster::wait_for_bytes(&shared.codes_here);
  const auto normaliser = [&] {
    cluster::wait_for_bytes(&shared.partials_here);
    float max = -FLT_MAX, sum = 0.0f;
    for (int i = lane; i < scanners; i += 32) max = fmaxf(max, shared.partials[i].max);
    max = warp_max(max);
    for (int i = lane; i < scanners; i += 32) {
      sum += shared.partials[i].sum * exp2_fast((shared.partials[i].max - max) * kLog2E);
    }
    return normaliser_of(max, warp_sum(sum, max, max));
  };
  select<T, kAligned>(shared.select, x, vocab, k, groups, [&](int g) { return shared.group_codes[g]; }, normaliser,
                      log_probs + row * k, token_ids + row * k);
#else
  __trap();  // built for another architecture than the card's
#endif
}

// Whether this device runs the kernel: Hopper's code was built, and a cluster fits.
template <typename T, bool kAligned, int kBlocks>
bool has_clusters() {
  constexpr int kDevices = 64;
  static std::atomic<int8_t> known[kDevices];  // 0 not yet, 1 no, 2 yes
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  if (const int8_t answer = known[device].load(std::memory_order_relaxed); answer != 0) return answer == 2;
  const auto kernel = topk_in_cluster<T, kAligned, kBlocks>;
  cudaFuncAttributes built;
  cudaLaunchConfig_t config{};
  config.gridDim = kBlocks, config.blockDim = kSelectThreads;
  int clusters = 0;
  const bool fits =
      cudaFuncGetAttributes(&built, kernel) == cudaSuccess && built.binaryVersion == 90 && built.ptxVersion == 90 &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0;
  if (!fits) cudaGetLastError();  // the answer, not an error of the launch to come
  known[device].store(fits ? 2 : 1, std::memory_order_relaxed);
  return fits;
}

// Launches clusters of kBlocks where rows are at most `most` and the device has them.
template <typename T, bool kAligned, int kBlocks>
bool launched_in_clusters(const ddtree_draft_topk_args& args, int64_t most, cudaStream_t stream) {
  const int64_t groups = ceil_div(args.vocab, kGroup);
  if (args.rows > most || groups > kClusterGroups || !has_clusters<T, kAligned, kBlocks>()) return false;
  topk_in_cluster<T, kAligned, kBlocks><<<static_cast<unsigned>(args.rows * kBlocks), kSelectThreads, 0, stream>>>(
      static_cast<const T*>(args.logits), static_cast<int>(args.vocab), static_cast<int>(args.k),
      static_cast<int>(groups), args.log_probs, args.token_ids);
  return true;
}

template <typename T, bool kAligned>
int launch(const ddtree_draft_topk_args& args, cudaStream_t stream) {
  if (launched_in_clusters<T, kAligned, kLargeClusterBlocks>(args, kLargeClusterRows, stream) ||
      launched_in_clusters<T, kAligned, kSmallClusterBlocks>(args, kSmallClusterRows, stream)) {
    return ddtree::launch_status();
  }
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
  const int64_t row_bytes = p.splits * sizeof(Partial) + p.groups * sizeof(uint32_t);
  return static_cast<size_t>(ddtree::Product({rows, row_bytes}).value_or(0));
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
