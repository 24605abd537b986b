// How query tiles and cache rows come to the Hopper kernel's shared memory: by one thread and TMA, or by the warps that
// widen e4m3.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_LOAD_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_LOAD_H_

#include <cuda_bf16.h>
#include <stdint.h>

#include "ffi/cuda/cluster.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/cluster.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/hopper_shared.h"
#include "ffi/cuda/verify_attn/hopper_widen.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"

namespace ddtree {
namespace hopper {

// Loads a half of a tile.
__device__ __forceinline__ void load_half(uint8_t* keys, const Maps& maps, uint64_t* barrier, int half, int step,
                                          int plane) {
  sm90::load_box(keys + first_box(half) * sm90::kBoxBytes, &maps.halves[half], barrier, step * kHopperStep,
                 first_box(half), plane);
}

// Loads the tiles of steps [step, end_step) of a plane of the cache; `tile` is the next of the block's run.
//
// Where a request has many tiles, whose blocks go through the same rows at about the same time, they ask the L2 cache
// for steps ahead by turns; `own` is the segment's tile. Where not all of them run at once, nobody asks for some steps.
__device__ __forceinline__ void load_steps(Shared& s, const Maps& maps, int plane, int step, int end_step, int tiles,
                                           int own, uint32_t* tile) {
  int ahead = end_step;
  tiles = min(tiles, gridDim.x);
  if (tiles >= kManyTiles) {
    own -= divide(own, tiles) * tiles;
    const int first = step + kAhead, wave = divide(first, tiles) * tiles + own;
    ahead = wave < first ? wave + tiles : wave;
  }
#pragma unroll 1  // this thread has 24 registers
  for (; step < end_step; ++step, ++*tile) {
    const int buffer = *tile % 2;
    for (int i = 0; i < 2; ++i) {
      const int half = i ^ buffer;
      sm90::wait(&s.empty[buffer][half], *tile / 2 % 2 ^ 1);
      sm90::arrive_expecting(&s.full[buffer][half], (end_box(half) - first_box(half)) * sm90::kBoxBytes);
      load_half(s.keys[buffer], maps, &s.full[buffer][half], half, step, plane);
    }
    if (step + kAhead == ahead && ahead < end_step) {
      for (int half = 0; half < 2; ++half) {
        sm90::prefetch_box(&maps.halves[half], ahead * kHopperStep, first_box(half), plane);
      }
      ahead += tiles;
    }
  }
}

// Loads a cluster block's first tile, which is waited for box by box.
__device__ __forceinline__ void load_first_step(Shared& s, const Maps& maps, int plane, int step) {
  for (int box = 0; box < kBoxes; ++box) {
    sm90::arrive_expecting(&s.arrived[box], sm90::kBoxBytes);
    sm90::load_box(s.keys[0] + box * sm90::kBoxBytes, &maps.slice, &s.arrived[box], step * kHopperStep, box, plane);
  }
  for (int half = 0; half < 2; ++half) sm90::arrive(&s.full[0][half]);
}

// With what a block begins where all requests have all nodes and about the same length.
__device__ __forceinline__ Guess guess_start(const Problem& p) {
  const int tiles = shape_tiles(p.nodes, p.heads), all = p.batch * tiles, blocks = gridDim.x, block = blockIdx.x;
  // Whole tiles, or as many chunks of each as there are blocks for.
  const int chunks = max(divide(blocks, all), 1), rounds = max(divide(all, blocks), 1);
  if (all <= blocks) {
    // Or columns, as start_run chooses.
    const int steps = request_of(p, 0).steps, places = steps + kBeginCost;
    const Totals totals{.steps = all * steps,
                        .tiles = all,
                        .longest = steps,
                        .shortest = steps,
                        .columns = tiles,
                        .places = p.batch * places};
    const int run = column_run(totals, blocks);
    if (run + kColumnCost < whole_cost(totals, divide(steps + chunks - 1, chunks), 1)) {
      const int number = divide(block, tiles), request = divide(number * run, places), tile = block - number * tiles;
      if (request >= p.batch || tile >= request_of(p, request).tiles) return {.request = p.batch, .tile = 0, .step = 0};
      return {.request = request, .tile = tile, .step = max(number * run - request * places - kBeginCost, 0)};
    }
  }
  const int place = rounds * block, request = divide(place, chunks * tiles);
  if (request >= p.batch) return {.request = p.batch, .tile = 0, .step = 0};
  const Request r = request_of(p, request);
  const int in_request = place - request * chunks * tiles, chunk = divide(in_request, tiles);
  const int tile = in_request - chunk * tiles;
  return {.request = tile < r.tiles ? request : p.batch,
          .tile = tile,
          .step = chunk_begin(r.steps, chunks, chunk)};
}

// Loads it while the plan is made.
__device__ __forceinline__ void load_guess(const Problem& p, Shared& s, const Maps& maps) {
  const Guess guess = s.guess;
  if (guess.request == p.batch) return;
  sm90::arrive_expecting(&s.guessed, 2 * kTileBytes);
  sm90::load_box(s.query, &maps.query, &s.guessed, query_row(p, guess.request, guess.tile), 0, 0);
  const int plane = layer_of(p.layer, p.layers) * p.batch + guess.request;
  for (int half = 0; half < 2; ++half) load_half(s.keys[0], maps, &s.guessed, half, guess.step, plane);
}

// What the loading warp does, by one thread.
inline __device__ void load_tiles(const Problem& p, Shared& s, const Maps& maps) {
  const int layer = layer_of(p.layer, p.layers);
  uint32_t tile = 0;  // of the block's run
  bool loaded = false;
  if (s.guess.request < p.batch) {
    sm90::wait(&s.guessed, 0);  // right or not: nothing else may go there before
    loaded = s.guess.is(s.segments[0]);
  }
  for (uint32_t number = 0;; ++number) {
    if (number >= 1) sm90::wait(&s.planned[number % 2], (number - 1) / 2 % 2);
    const Segment& segment = s.segments[number % 2];
    const int request = segment.request, end_step = segment.end_step, own = segment.tile;
    const int tiles = divide(segment.nodes * p.heads + kTileRows - 1, kTileRows);
    int step = segment.step;
    if (request == p.batch) return;
    if (loaded) {
      sm90::arrive(&s.query_full);
      for (int half = 0; half < 2; ++half) sm90::arrive(&s.full[0][half]);
      ++step;
      ++tile;
      loaded = false;
    } else {
      sm90::wait(&s.query_empty, number % 2 ^ 1);
      sm90::arrive_expecting(&s.query_full, kTileBytes);
      sm90::load_box(s.query, &maps.query, &s.query_full, query_row(p, request, own), 0, 0);
    }
    load_steps(s, maps, layer * p.batch + request, step, end_step, tiles, own, &tile);
  }
}

// What the warps that widen do, of which this is `warp`.
__device__ __forceinline__ void widen_halves(const Problem& p, Shared& s, const Maps& maps, int warp, int lane) {
  constexpr int kWarps = kGroupThreads / 32;
  const auto load_query = [&](uint32_t number, const Segment& segment) {
    sm90::wait(&s.query_empty, number % 2 ^ 1);
    sm90::arrive_expecting(&s.query_full, kTileBytes);
    sm90::load_box(s.query, &maps.query, &s.query_full, query_row(p, segment.request, segment.tile), 0, 0);
  };
  const auto half_of = [](uint32_t tile, int i) { return i ^ static_cast<int>(tile % 2); };
  const auto widen = [&](uint32_t tile, const widening::Piece<kWarps>& piece, int half, int warp, int lane) {
    const int buffer = tile % 2;
    sm90::wait(&s.empty[buffer][half], tile / 2 % 2 ^ 1);
    piece.store(s.keys[buffer], s.keys[buffer] + (kBoxes - 1) * sm90::kBoxBytes, half, warp, lane);
    sm90::fence_writes();
    __syncwarp();
    if (lane == 0) sm90::arrive(&s.full[buffer][half]);
  };
  widening::widen_tiles<kWarps>(p, s, warp, lane, load_query, half_of, widen);
}

// What a cluster's block does before its threads part. Its first tile is asked for before lengths have been read; the
// query as soon as all blocks' barriers are there, a box by each block for all of them.
//
// All warps wait for the cluster before they meet again, though only the loading one needs it: racecheck lets no warp
// past that wait until all of its block have come there, as does the code that ptxas makes of it for launches without
// clusters. That costs nothing, since what is waited for is that all have arrived.
__device__ __forceinline__ void start_cluster_block(const Problem& p, Shared& s, const Maps& maps, int thread) {
  const int size = cluster::size(), rank = blockIdx.x % size, tiles = shape_tiles(p.nodes, p.heads);
  const int place = blockIdx.x / size, request = place / tiles, box_rows = query_box_rows(p);
  if (thread == kComputeThreads) {
    const int layer = p.layers == 1 ? 0 : layer_of(p.layer, p.layers);
    init_load_barriers<__nv_bfloat16>(s);
    s.plane = layer * p.batch + request;
  }
  __syncwarp();
  cluster::arrive_relaxed();  // the barriers' own fence has made them known
  if (thread == kComputeThreads) {
    load_first_step(s, maps, s.plane, rank);
    for (int box = 0; box < kBoxes; ++box) sm90::arrive_expecting(&s.arrived[box], box_rows * 128);
  } else if (thread == kComputeThreads + 32) {
    s.share = cluster_segment(p, blockIdx.x, size, true);
    s.segments[0] = s.share;
  } else if (thread == kComputeThreads + 64) {
    init_barriers(s);
  } else if (thread < kComputeThreads) {
    // Rows that no load fills: their scores are nothing's, but whatever memory held would make them rescale.
    for (int i = thread; i < kBoxes * (kTileRows - box_rows) * 8; i += kComputeThreads) {
      const int box = i / ((kTileRows - box_rows) * 8), chunk = i - box * ((kTileRows - box_rows) * 8);
      reinterpret_cast<uint4*>(s.query + box * sm90::kBoxBytes + box_rows * 128)[chunk] = make_uint4(0, 0, 0, 0);
    }
    sm90::fence_writes();
  }
  __syncwarp();
  cluster::wait();  // all blocks' barriers are there
  if (thread == kComputeThreads) {
    const int row = query_row(p, request, place - request * tiles);
    for (int box = rank; box < kBoxes; box += size) {
      sm90::load_box_for_all(s.query + box * sm90::kBoxBytes, &maps.query, &s.arrived[box], row, box, 0,
                             (1 << size) - 1);
    }
  }
  __syncwarp();
}

// Brings the ancestors of a tile's nodes near, for the masked steps, which are a block's last.
__device__ __forceinline__ void fetch_ancestors(const Problem& p, Shared& s, int lane) {
  const ClusterSegment& segment = s.share;
  const int count = step_count(segment);
  if (count == 0 || (step_at(segment, count - 1) + 1) * kHopperStep <= segment.length) return;
  const int row = segment.tile * kTileRows;
  const int first = row / p.heads, last = min((row + kTileRows - 1) / p.heads, segment.nodes - 1);
  const uint32_t* ancestors = p.ancestors + static_cast<int64_t>(segment.request) * p.nodes * p.words;
  uint32_t all = 0;
  for (int i = first * p.words + lane; i < (last + 1) * p.words; i += 32) all |= ancestors[i];
  if (__any_sync(~0u, all != 0) && lane == 0) s.fetched = true;
}

}  // namespace hopper
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_LOAD_H_
