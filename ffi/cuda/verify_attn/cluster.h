// Clusters: how the Hopper kernels split a tile between blocks where tiles are few.
//
// Problem. A short batch has fewer tiles than the card has SMs. To split a tile costs a second launch, which combines
// the splits by way of memory: about four steps' time.
//
// Schedule. The blocks of a cluster share the steps of one tile evenly. Each leaves its output, maxima and sums in its
// own shared memory, where its keys were. After a cluster barrier the rows are dealt out among the blocks, and each
// combines its rows out of the shared memory of all. So no split goes to memory, there is no second launch, and the
// plan is a division.
//
// Bound. Another block's shared memory gives 14 bytes per cycle, a quarter of what L2 gives: that is why splits are
// float16. All of a call's clusters must run at once, and what runs at once depends on the size: an H200 takes 7
// clusters of 16 blocks, 15 of 8, 17 of 6, 30 of 4.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_CLUSTER_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_CLUSTER_H_

#include <cuda_fp16.h>
#include <stdint.h>

#include "ffi/cuda/cluster.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {

constexpr int kMostCluster = 16;  // blocks of a cluster that Hopper can be asked for

// Tiles of a request if all its nodes are real.
__host__ __device__ constexpr int shape_tiles(int nodes, int heads) {
  return (nodes * heads + kTileRows - 1) / kTileRows;
}

// How many of a cluster's blocks share the steps of a tile; the others have none.
__host__ __device__ constexpr int sharers_of(int steps, int size) { return steps < size ? steps : size; }

// What a block of a cluster does: step `first` if `lead` is 1 (it is 0 or 1), then steps [step, end_step).
struct ClusterSegment : Segment {
  int lead, first;
};

__host__ __device__ inline int step_count(const ClusterSegment& s) { return s.lead + s.end_step - s.step; }
__host__ __device__ inline int step_at(const ClusterSegment& s, int i) {
  return i < s.lead ? s.first : s.step + i - s.lead;
}

// What a block of a cluster of `size` does; no step where there is none for it. With `leads` its first step is that of
// its rank, so that it can be loaded before lengths are there, and what comes after those of all ranks is cut evenly.
__host__ __device__ inline ClusterSegment cluster_segment(const Problem& p, int block, int size, bool leads) {
  const int cluster = block / size, rank = block - cluster * size, tiles = shape_tiles(p.nodes, p.heads);
  ClusterSegment s{};
  s.request = cluster / tiles;
  s.tile = cluster - s.request * tiles;
  s.length = min(max(p.lengths[s.request], 0), p.rows - p.nodes);
  s.nodes = min(max(p.num_nodes[s.request], 0), p.nodes);
  if (s.tile * kTileRows < s.nodes * p.heads) s.steps = (s.length + s.nodes + kHopperStep - 1) / kHopperStep;
  s.lead = leads && rank < s.steps ? 1 : 0;
  s.first = rank;
  // The longer shares first: the last has the masked steps, which take longer.
  const int begin = leads ? size : 0, rest = max(s.steps - begin, 0), least = rest / size, longer = rest - least * size;
  s.step = begin + least * rank + min(rank, longer);
  s.end_step = s.step + least + (rank < longer ? 1 : 0);
  return s;
}

// What serves a batch of `batch` requests of `tiles` tiles of up to `steps` steps: clusters of so many blocks, or with
// 0 all blocks and a combining launch. `fits[c]` is how many clusters of c blocks the card runs at once; all must run
// at once.
//
// Clusters leave SMs idle, and do not share out their tiles' steps among them. So they are taken if, at the most
// steps that there may be, they cost no more than what they save, be all requests as long or all but one empty.
inline int cluster_size(int64_t batch, int64_t tiles, int64_t steps, int sms,
                        const int (&fits)[kMostCluster + 1]) {
  constexpr int kSaved = 4;   // in steps: the combining launch, and splits by way of memory
  constexpr int kRagged = 8;  // that may be lost where one request is long
  int size = kMostCluster;
  while (size > 1 && (fits[size] < batch * tiles || size > steps)) --size;
  const int64_t share = ceil_div(steps, size);
  const bool taken = fits[size] >= batch * tiles && share <= ceil_div(batch * tiles * steps, sms) + kSaved &&
                     share <= ceil_div(tiles * steps, sms) + kRagged;
  return taken ? size : 0;
}

// A launch of `blocks` blocks in clusters of `size`; `attribute` must live as long.
inline cudaLaunchConfig_t cluster_config(int threads, size_t shared_bytes, int blocks, int size, cudaStream_t stream,
                                         cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// Lets a kernel have so much shared memory and such clusters; more than eight blocks are not portable.
template <typename Kernel>
bool allow_launch(Kernel kernel, size_t shared_bytes, int size) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)) ==
             cudaSuccess &&
         (size <= 8 || cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess);
}

template <typename Kernel, typename... Arguments>
int launch_clusters(Kernel kernel, int threads, size_t shared_bytes, int blocks, int size, cudaStream_t stream,
                    const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = cluster_config(threads, shared_bytes, blocks, size, stream, &attribute);
  const bool launched = allow_launch(kernel, shared_bytes, size) &&
                        cudaLaunchKernelEx(&config, kernel, arguments...) == cudaSuccess;
  return launch_status() == DDTREE_OK && launched ? DDTREE_OK : DDTREE_LAUNCH_FAILED;
}

// Rows of a box of the query: where a request has fewer than a tile's, no more are loaded.
__host__ __device__ constexpr int query_box_rows(const Problem& p) {
  return p.nodes * p.heads < kTileRows ? p.nodes * p.heads : kTileRows;
}

// Real rows of a segment's tile.
__device__ __forceinline__ int real_rows(const Problem& p, const Segment& s) {
  return min(s.nodes * p.heads - s.tile * kTileRows, kTileRows);
}

// The powers of two that bring elements of up to `greatest` near the greatest of float16, where its subnormals matter
// least, and back. Infinity and NaN stay what they are.
struct HalfScale {
  float down, up;
  __device__ __forceinline__ explicit HalfScale(float greatest) {
    const int exponent = min(max(__float_as_int(greatest) >> 23, 15), 254);
    down = __int_as_float(268 - exponent << 23);
    up = __int_as_float(exponent - 14 << 23);
  }
};

// What a block leaves in shared memory, in the dtype of splits in memory: float16, since what takes long is to read
// the other blocks' rows. Rows are so far apart that neither writers nor readers meet in a bank.
struct alignas(16) Left {
  __half rows[kTileRows][DDTREE_LATENT_DIM + 8];
  SplitRow softmax[kTileRows];
};

// Leaves a block's output, of which each of two warpgroups has 256 columns; accumulators lie as sm90.h says. `sums` has
// the warpgroups' shares.
__device__ __forceinline__ void leave_output(const Problem& p, const Segment& segment, Left* left, int thread,
                                             const float (&out)[128], const float (&maximum)[2],
                                             const float (&sums)[2][kTileRows]) {
  const int side = thread / 128, lane = thread % 32, real = real_rows(p, segment);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float greatest = 0;
#pragma unroll
    for (int n = 0; n < 64; ++n) greatest = fmaxf(greatest, fabsf(out[n / 2 * 4 + half * 2 + n % 2]));
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 1));
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 2));
    const int row = thread % 128 / 32 * 16 + lane / 4 + half * 8;
    if (row >= real) continue;
    const HalfScale scale(greatest);
    if (lane % 4 == 0) {
      left->softmax[row].scale[side] = scale.up;
      if (side == 0) {
        left->softmax[row].maximum = maximum[half];
        left->softmax[row].sum = sums[0][row] + sums[1][row];
      }
    }
    __half2* to = reinterpret_cast<__half2*>(&left->rows[row][side * 256 + lane % 4 * 2]);
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      to[n * 4] = __floats2half2_rn(out[n * 4 + half * 2] * scale.down, out[n * 4 + half * 2 + 1] * scale.down);
    }
  }
}

__device__ __forceinline__ int wrapped(int block, int sharers) { return block < sharers ? block : block - sharers; }

// Merges this block's share of a tile's rows, every size-th, from the shared memory of the blocks that had steps. A row
// is two warps'; kWarps call it.
template <int kWarps>
__device__ __forceinline__ void combine_rows(const Problem& p, const Segment& segment, const Left* left, int thread) {
  constexpr int kTogether = 4;  // blocks that a warp asks at once
  const int size = cluster::size(), rank = blockIdx.x % size, warp = thread / 32, lane = thread % 32;
  const int sharers = sharers_of(segment.steps, size), real = real_rows(p, segment);
  const int side = warp % 2, column = side * 256 + lane * 8;
  const int64_t first = static_cast<int64_t>(segment.request) * p.nodes * p.heads + segment.tile * kTileRows;
#pragma unroll 1
  for (int row = rank + warp / 2 * size; row < real; row += kWarps / 2 * size) {
    const uint32_t from = sm90::shared_address(&left->rows[row][column]);
    // Each row begins with another block, so that not all read the same one's memory.
    int block = row % sharers;
    uint4 x[kTogether];
    const auto ask = [&](int j) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (j + i < sharers) x[i] = cluster::load(cluster::address_in(from, wrapped(block + i, sharers)));
      }
    };
    // Lane i knows what block i says of the row.
    uint4 softmax = make_uint4(0xff800000u, 0, 0, 0);  // a maximum of -inf
    if (lane < sharers) softmax = cluster::load(cluster::address_in(sm90::shared_address(&left->softmax[row]), lane));
    ask(0);
    const float top = __uint_as_float(softmax.x);
    float greatest = top;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, d));
    const float shrink = top == greatest ? 1.0f : power_of_two(top - greatest);
    float sum = shrink * __uint_as_float(softmax.y);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float factor = shrink * __uint_as_float(side == 0 ? softmax.z : softmax.w);
    float total[8] = {};
#pragma unroll 1
    for (int j = 0; j < sharers; j += kTogether) {
      if (j > 0) ask(j);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (j + i >= sharers) break;
        const float f = __shfl_sync(~0u, factor, wrapped(block + i, sharers));
        const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
          total[k * 2] += f * pair.x;
          total[k * 2 + 1] += f * pair.y;
        }
      }
      block = wrapped(block + kTogether, sharers);
    }
    const float inverse = 1.0f / sum;
    *reinterpret_cast<uint4*>(p.out + (first + row) * DDTREE_LATENT_DIM + column) =
        make_uint4(pack(total[0] * inverse, total[1] * inverse), pack(total[2] * inverse, total[3] * inverse),
                   pack(total[4] * inverse, total[5] * inverse), pack(total[6] * inverse, total[7] * inverse));
  }
}

// Gives this block's share of a tile's rows past num_nodes their own latent.
template <int kWarps>
__device__ __forceinline__ void copy_latents(const Problem& p, const Segment& segment, int thread) {
  constexpr int kChunks = DDTREE_LATENT_DIM / 8, kRowChunks = DDTREE_ROW_DIM / 8;  // of 16 bytes
  const int size = cluster::size(), rank = blockIdx.x % size, warp = thread / 32, lane = thread % 32;
  const int request_rows = p.nodes * p.heads, first_row = segment.tile * kTileRows;
  const int64_t plane = static_cast<int64_t>(layer_of(p.layer, p.layers)) * p.batch + segment.request;
  const uint4* latents = static_cast<const uint4*>(p.cache) + (plane * p.rows + segment.length) * kRowChunks;
  uint4* out = reinterpret_cast<uint4*>(p.out) + static_cast<int64_t>(segment.request) * request_rows * kChunks;
#pragma unroll 1
  for (int row = max(first_row, segment.nodes * p.heads) + rank * kWarps + warp;
       row < min(request_rows, first_row + kTileRows); row += size * kWarps) {
#pragma unroll
    for (int i = lane; i < kChunks; i += 32) {
      out[static_cast<int64_t>(row) * kChunks + i] = latents[static_cast<int64_t>(row / p.heads) * kRowChunks + i];
    }
  }
}

// What is left to do when a block has left its output. All threads that have not ended call it.
template <int kWarps>
__device__ __forceinline__ void combine_cluster(const Problem& p, const Segment& segment, const Left* left,
                                                int thread) {
  cluster::arrive();
  cluster::wait();
  combine_rows<kWarps>(p, segment, left, thread);
  cluster::arrive_relaxed();  // no other block's memory is read from here on
  copy_latents<kWarps>(p, segment, thread);
  cluster::wait();
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_CLUSTER_H_
