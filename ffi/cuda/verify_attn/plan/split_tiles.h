// What blocks leave for launch_combine: where splits lie, and the list of the tiles that are split.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_SPLIT_TILES_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_SPLIT_TILES_H_

#include <stdint.h>

#include "ffi/cuda/verify_attn/plan/find.h"
#include "ffi/cuda/verify_attn/plan/order.h"
#include "ffi/cuda/verify_attn/plan/run.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {

constexpr int kBlockSplits = 3;  // that a block can leave

// The softmax of a split's row: the greatest score and the sum of weights relative to it. The output stands for itself
// times `scale`, one for each half of the columns.
struct SplitRow {
  float maximum, sum, scale[2];
};

// Bytes of a split: 64 rows of output, then their softmax.
template <typename Element>
constexpr int kSplitBytes = kTileRows * (DDTREE_LATENT_DIM * sizeof(Element) + sizeof(SplitRow));

// Where a block leaves one of its splits.
template <typename Element>
DDTREE_PLAN uint8_t* split_of(const Problem& p, int block, int split) {
  return p.splits + static_cast<int64_t>(kBlockSplits * block + split) * kSplitBytes<Element>;
}

// The splits of a tile, as launch_combine goes through them.
struct Splits {
  int run, whole;     // of the plan
  int tiles, before;  // of the request with places in the order, and the places before its steps
  int steps, chunks;  // of the tile
  int tile;           // counted from first_tile; in columns it is 0
  int columns, column;  // run r of the plan is block r * columns + column's; 1 and 0 without columns
  // Upper bounds of the blocks that an item meets, and of the splits.
  DDTREE_PLAN int most_blocks() const {
    return whole ? 1 : divide(divide(steps + chunks - 1, chunks) + run - 2, run) + 1;
  }
  DDTREE_PLAN int count() const { return chunks * most_blocks(); }
  // Part i: its block times kBlockSplits, and which of the block's. -1 where an item meets fewer blocks.
  DDTREE_PLAN int get(int i) const {
    if (whole) return (divide(before, run) + i * tiles + tile) * kBlockSplits + 1;
    const int chunk = divide(i, most_blocks()), number = i - chunk * most_blocks();
    const int begin = chunk_begin(steps, chunks, chunk), end = chunk_begin(steps, chunks, chunk + 1);
    const int first = before + tiles * begin + tile * (end - begin);
    const int block = divide(first, run), last = divide(first + end - begin - 1, run);
    if (block + number > last) return -1;
    return ((block + number) * columns + column) * kBlockSplits + (number > 0 ? 0 : block == last ? 1 : 2);
  }
  // Whether a tile that is not of chunks lies within a run, whose block then wrote its output.
  DDTREE_PLAN bool is_unsplit() const {
    const int first = before + tile * steps;
    return chunks == 1 && (whole || divide(first, run) == divide(first + steps - 1, run));
  }
};

// The splits of a tile; `rest` is what of its request has places, `before` are the places before the request.
DDTREE_PLAN Splits splits_of(const Plan& plan, const Request& rest, int before, int tile) {
  const int steps_before = before + begin_cost(plan), chunks = chunks_of(plan, rest);
  if (plan.columns > 0) {
    return {.run = plan.run,
            .whole = plan.whole,
            .tiles = rest.tiles,
            .before = steps_before,
            .steps = rest.steps,
            .chunks = chunks,
            .tile = 0,
            .columns = plan.columns,
            .column = tile};
  }
  return {.run = plan.run,
          .whole = plan.whole,
          .tiles = rest.tiles,
          .before = steps_before,
          .steps = rest.steps,
          .chunks = chunks,
          .tile = tile,
          .columns = 1,
          .column = 0};
}

// What launch_combine must know of a tile that may have been split.
struct alignas(16) SplitTile {
  Splits splits;
  int request, first_row, rows;  // of the request's rows; none if the tile was not cut
};

struct alignas(16) SplitTiles {
  int count;       // of `tiles`
  int most_splits;  // of one, at most
  SplitTile tiles[1];
};

// Tile `tile` of what of a request has places; no rows if it was not cut. `before` are the places before the request.
DDTREE_PLAN SplitTile split_tile(const Problem& p, const Plan& plan, const Request& rest, int before, int request,
                             int tile) {
  const Splits splits = splits_of(plan, rest, before, tile);
  const int first_row = (tile + first_tile(plan, request, request_of(p, request))) * kTileRows;
  return {.splits = splits,
          .request = request,
          .first_row = first_row,
          .rows = splits.is_unsplit() ? 0 : min(rest.nodes * p.heads - first_row, kTileRows)};
}

// The tile that the end of a block's run cuts, if the block has its first split and the tile is not of chunks; else one
// of no rows. It is for plans that are not of whole items.
DDTREE_PLAN SplitTile split_at_end(const Problem& p, const Run& run) {
  const Plan& plan = run.plan;
  if (run.last_request >= p.batch) return {};
  const Request rest = rest_of(p, plan, run.last_request);
  const int steps_before = run.last_before + begin_cost(plan), from = run.end - 1 - steps_before;
  if (from < 0 || rest.steps == 0 || chunks_of(plan, rest) > 1) return {};
  const int number = divide(from, rest.steps), begin = steps_before + number * rest.steps;
  if (begin < run.start || begin + rest.steps <= run.end) return {};
  return split_tile(p, plan, rest, run.last_before, run.last_request, number + run.column);
}

// Lists the tiles that were cut. Those of chunks all were. For others there is a place each, or if there are more tiles
// than blocks, one for each block, for what the end of its run cuts. The blocks share the list out, and each its own
// between `warps` warps, of which this is `warp`.
__device__ __forceinline__ void list_split_tiles(const Problem& p, const Run& run, int warp, int warps, int lane) {
  SplitTiles* list = p.split_tiles;
  const Plan& plan = run.plan;
  const int blocks = gridDim.x, ends = !plan.whole && run.cuttable > blocks ? blocks : 0;
  if (ends > 0 && warp == 0 && lane == 0) list->tiles[blockIdx.x] = split_at_end(p, run);
  __syncwarp();
  for (int index = blockIdx.x * warps + warp, count = index + 1; index < count; index += gridDim.x * warps) {
    int places = 0, most_splits = 0;
    count = 0;
#pragma unroll 1
    for (int b = lane; b - lane < p.batch; b += 32) {
      const Request rest = b < p.batch ? rest_of(p, plan, b) : Request{};
      const int own_places = b < p.batch ? places_of(plan, rest) : 0;
      const int before = places + prefix_sum(own_places, lane) - own_places;
      const Splits splits = splits_of(plan, rest, before, 0);
      const bool listed = splits.chunks > 1 || (!plan.whole && ends == 0);
      const int own = listed ? rest.tiles * max(plan.columns, 1) : 0;
      const int end = count + prefix_sum(own, lane), tile = index - (end - own);
      if (rest.tiles > 0 && (own > 0 || !plan.whole)) most_splits = max(most_splits, splits.count());
      if (tile >= 0 && tile < own) {
        list->tiles[ends + index] = split_tile(p, plan, rest, before, b, tile);
      }
      count = __shfl_sync(~0u, end, 31);
      places = __shfl_sync(~0u, before + own_places, 31);
    }
    most_splits = warp_max(most_splits);
    if (index == 0 && lane == 0) {
      list->count = ends + count;
      list->most_splits = most_splits;
    }
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_SPLIT_TILES_H_
