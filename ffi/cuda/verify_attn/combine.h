// The second launch of verify_attn in bfloat16: combines the splits of tiles by log-sum-exp, and gives rows past
// num_nodes their own latent.
//
// Problem. Tiles whose steps several blocks did have one split from each: an output of 64 rows by 512 columns with each
// row's maximum and sum. The result of a row is the sum of its splits, each scaled by 2^(its maximum - the greatest)
// and divided by the sum of sums.
//
// Bound: latency. A row is four dependent waits for the L2 cache, so what counts is how many loads an SM has under way.
//
// Schedule. All splits of a row are asked for at once. Two warps have a row's halves. Where rows have few splits, a
// block does four rows side by side; else four pairs of warps share the splits of one row and add up in shared memory.
// In float16 three blocks of eight warps fit an SM, each warp asking for four splits at a time; two blocks that asked
// for eight took up to twice as long. Blocks share out the rows that tiles can have, by a list of the split tiles that
// the first launch leaves.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_COMBINE_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_COMBINE_H_

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"
#include "ffi/e4m3.h"

namespace ddtree {
namespace combining {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSides = 2;               // warps of a row, each with half of its columns, eight for a lane
constexpr int kRows = kWarps / kSides;  // of a block, or ways in which the splits of one row are shared out
constexpr int kFewSplits = 8;            // that need not be shared out

// A lane's columns of a split's row, as they lie in memory.
template <typename Element>
struct Slice;

template <>
struct Slice<float> {
  static constexpr int kTogether = 4;  // that a warp asks for at a time
  static constexpr int kBlocks = 2;    // for an SM, as many as registers allow
  float4 x[2];
  __device__ __forceinline__ void load(const float* row) {
    x[0] = reinterpret_cast<const float4*>(row)[0];
    x[1] = reinterpret_cast<const float4*>(row)[1];
  }
  __device__ __forceinline__ void add_to(float (&total)[8], float factor) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      total[v * 4] += factor * x[v].x;
      total[v * 4 + 1] += factor * x[v].y;
      total[v * 4 + 2] += factor * x[v].z;
      total[v * 4 + 3] += factor * x[v].w;
    }
  }
};

template <>
struct Slice<__half> {
  static constexpr int kTogether = 4;
  static constexpr int kBlocks = 3;
  uint4 x;
  __device__ __forceinline__ void load(const __half* row) { x = *reinterpret_cast<const uint4*>(row); }
  __device__ __forceinline__ void add_to(float (&total)[8], float factor) const {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      total[i * 2] += factor * pair.x;
      total[i * 2 + 1] += factor * pair.y;
    }
  }
};

// The sum of some of a row's splits: the greatest score, the weights' sum, and a lane's columns.
struct Sum {
  float top = -INFINITY, sum = 0, total[8] = {};
};

// By what something with greatest score `from` is multiplied where the greatest is `to`.
__device__ __forceinline__ float shrink(float from, float to) { return from == to ? 1.0f : power_of_two(from - to); }

// Adds a row of splits; lane i < count <= 32 knows one of them, or -1. `column` is the lane's first.
template <typename Element>
__device__ __forceinline__ void add_splits(const uint8_t* splits, int known, int count, int row, int column, Sum* all) {
  constexpr int kTogether = Slice<Element>::kTogether;
  const auto elements_of = [&](int number) {
    return reinterpret_cast<const Element*>(splits + static_cast<int64_t>(number) * kSplitBytes<Element>);
  };
  Slice<Element> slices[kTogether];
  const auto load = [&](int begin) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int number = __shfl_sync(~0u, known, begin + k);  // -1 beyond count, or nothing at all beyond 31
      slices[k] = {};
      if (begin + k < count && number >= 0) slices[k].load(elements_of(number) + row * DDTREE_LATENT_DIM + column);
    }
  };
  float4 softmax = make_float4(-INFINITY, 0, 0, 0);
  if (known >= 0) softmax = reinterpret_cast<const float4*>(elements_of(known) + kTileRows * DDTREE_LATENT_DIM)[row];
  load(0);
  float top = softmax.x;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  top = fmaxf(top, all->top);
  const float before = shrink(all->top, top), factor = shrink(softmax.x, top);
  float sum = factor * softmax.y;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  all->top = top;
  all->sum = all->sum * before + sum;
#pragma unroll
  for (int i = 0; i < 8; ++i) all->total[i] *= before;
  const float weight = factor * (column < DDTREE_LATENT_DIM / 2 ? softmax.z : softmax.w);
  for (int begin = 0;;) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const float own = __shfl_sync(~0u, weight, begin + k);
      if (begin + k < count) slices[k].add_to(all->total, own);
    }
    begin += kTogether;
    if (begin >= count) return;
    load(begin);
  }
}

// Rows past num_nodes: what lies in the cache for them. A warp per row.
template <typename Cache>
__device__ __forceinline__ void copy_latents(const Problem& p, float scale, int lane) {
  const int layer = layer_of(p.layer, p.layers), request_rows = p.nodes * p.heads;
  for (int64_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < static_cast<int64_t>(p.batch) * request_rows;
       i += gridDim.x * kWarps) {
    const int b = static_cast<int>(i / request_rows), node = static_cast<int>(i - int64_t{b} * request_rows) / p.heads;
    const Request r = request_of(p, b);
    if (node < r.nodes) continue;
    const Cache* latent = static_cast<const Cache*>(p.cache) +
                          ((static_cast<int64_t>(layer) * p.batch + b) * p.rows + r.length + node) * DDTREE_ROW_DIM;
    __nv_bfloat16* out = p.out + i * DDTREE_LATENT_DIM;
#pragma unroll
    for (int column = lane * 8; column < DDTREE_LATENT_DIM; column += 32 * 8) {
      uint4 x;
      if constexpr (sizeof(Cache) == 1) {
        const uint2 bytes = *reinterpret_cast<const uint2*>(latent + column);
        const auto pair = [&](uint32_t word, int shift) {
          return pack(FromE4m3(static_cast<uint8_t>(word >> shift)) * scale,
                      FromE4m3(static_cast<uint8_t>(word >> (shift + 8))) * scale);
        };
        x = make_uint4(pair(bytes.x, 0), pair(bytes.x, 16), pair(bytes.y, 0), pair(bytes.y, 16));
      } else {
        x = *reinterpret_cast<const uint4*>(latent + column);
      }
      *reinterpret_cast<uint4*>(out + column) = x;
    }
  }
}

template <typename Cache, typename Element>
__global__ void __launch_bounds__(kThreads, Slice<Element>::kBlocks) combine(const Problem p) {
  __shared__ float totals[kRows][DDTREE_LATENT_DIM];
  __shared__ float tops[kRows], sums[kRows];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / kSides, column = warp % kSides * (DDTREE_LATENT_DIM / kSides) + lane * 8;
  float scale = 1.0f;
  if constexpr (sizeof(Cache) == 1) scale = layer_scale(p.cache_scale, p.layer, p.layers);
  bool padded = false;
#pragma unroll 1
  for (int b = lane; b < p.batch; b += 32) padded |= p.num_nodes[b] < p.nodes;
  if (__any_sync(~0u, padded)) copy_latents<Cache>(p, scale, lane);
  const SplitTiles& list = *p.split_tiles;
  const bool shared_out = list.most_splits > kFewSplits;
  // Tiles may have fewer rows than there is room for, and blocks with nothing but such rows would be idle.
  const uint32_t tile_rows = min(kTileRows, p.nodes * p.heads), together = shared_out ? 1 : kRows;
  // A pair of warps has so many rows of a tile one after the other, whose splits it looks up once.
  const uint32_t pairs = gridDim.x * together, each = max((list.count * tile_rows + pairs - 1) / pairs, 1u);
  const uint32_t units = (tile_rows + each - 1) / each;
  const int way = shared_out ? group : 0, ways = shared_out ? kRows : 1;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x * together + (shared_out ? 0 : group); unit < list.count * units; unit += pairs) {
    const uint32_t number = unit / units, first = (unit - number * units) * each;
    const SplitTile& tile = list.tiles[number];
    const int end = min(static_cast<int>(first + each), tile.rows);
    if (static_cast<int>(first) >= end) continue;
    const Splits splits = tile.splits;
    const int count = splits.count();
    const int64_t first_row = static_cast<int64_t>(tile.request) * p.nodes * p.heads + tile.first_row;
#pragma unroll 1
    for (int row = first; row < end; ++row) {
      Sum all;
#pragma unroll 1
      for (int i = way; i < count; i += 32 * ways) {
        const int own = i + lane * ways, known = own < count ? splits.get(own) : -1;
        add_splits<Element>(p.splits, known, min((count - i + ways - 1) / ways, 32), row, column, &all);
      }
      __nv_bfloat16* out = p.out + (first_row + row) * DDTREE_LATENT_DIM;
      if (!shared_out) {
        const float inverse = scale / all.sum;
        const float* x = all.total;
        *reinterpret_cast<uint4*>(out + column) =
            make_uint4(pack(x[0] * inverse, x[1] * inverse), pack(x[2] * inverse, x[3] * inverse),
                       pack(x[4] * inverse, x[5] * inverse), pack(x[6] * inverse, x[7] * inverse));
        continue;
      }
      __syncthreads();  // the row before has been read
      if (lane == 0) {
        tops[group] = all.top;
        sums[group] = all.sum;
      }
      float4* to = reinterpret_cast<float4*>(&totals[group][column]);
      to[0] = make_float4(all.total[0], all.total[1], all.total[2], all.total[3]);
      to[1] = make_float4(all.total[4], all.total[5], all.total[6], all.total[7]);
      __syncthreads();
      float top = -INFINITY, sum = 0;
      float2 total = make_float2(0, 0);
#pragma unroll
      for (int g = 0; g < kRows; ++g) top = fmaxf(top, tops[g]);
#pragma unroll
      for (int g = 0; g < kRows; ++g) {
        const float factor = shrink(tops[g], top);
        const float2 x = *reinterpret_cast<const float2*>(&totals[g][threadIdx.x * 2]);
        sum += factor * sums[g];
        total.x += factor * x.x;
        total.y += factor * x.y;
      }
      const float inverse = scale / sum;
      *reinterpret_cast<uint32_t*>(out + threadIdx.x * 2) = pack(total.x * inverse, total.y * inverse);
    }
  }
}

}  // namespace combining

// `Element` is what the first launch has left its splits in, float or __half.
template <typename Element>
int launch_combine(const Problem& p, int sms, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.nodes * p.heads;
  const int blocks = static_cast<int>(std::min<int64_t>(rows, combining::Slice<Element>::kBlocks * sms));
  const auto kernel = p.e4m3 ? combining::combine<uint8_t, Element> : combining::combine<__nv_bfloat16, Element>;
  kernel<<<blocks, combining::kThreads, 0, stream>>>(p);
  return launch_status();
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_COMBINE_H_
