// The order of all work of a launch, and what has which place in it.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_ORDER_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_ORDER_H_

#include <stdint.h>

#include "ffi/cuda/verify_attn/problem.h"

// What concerns no warp as a whole is compiled for the host too, for its test.
#define DDTREE_PLAN __host__ __device__ __forceinline__

namespace ddtree {

constexpr int kMinRun = 2;      // steps below which another block costs more than it saves
constexpr int kShortRun = 32;   // steps in which blocks cannot get far from each other
constexpr int kCutCost = 12, kColumnCost = 4, kBeginCost = 5, kCombineCost = 2;  // in steps
constexpr int kRoundSlack = 4;  // by which whole tiles and the rest may be longer than an equal run

// Places in the order of all work are 32-bit integers; the launcher refuses problems with more than kMostSteps steps.
constexpr int64_t kMostSteps = 1 << 30;

// a / b of integers that are not negative: of signed ones it is twice the instructions.
DDTREE_PLAN int divide(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b)); }

struct Plan {
  int run;     // steps of a block, or the most of them
  bool whole;  // a block takes whole items; its places in the order are then `run`, used or not
  // Whole tiles that a block takes before its run, block by block in the order of requests and tiles; the first tile
  // after all of those. They have no places in the order.
  int tiles, request, tile;
  int columns;  // tiles of each request that has any; or 0. A block has column block % columns
};

struct Request {
  int length;  // rows that every node sees
  int nodes;   // real ones
  int tiles;
  int steps;  // of a tile
};

DDTREE_PLAN Request request_of(const Problem& p, int b) {
  Request r;
  r.length = min(max(p.lengths[b], 0), p.rows - p.nodes);
  r.nodes = min(max(p.num_nodes[b], 0), p.nodes);
  r.tiles = (r.nodes * p.heads + kTileRows - 1) / kTileRows;
  r.steps = (r.length + r.nodes + p.step_rows - 1) >> (p.step_rows == 64 ? 6 : 5);
  return r;
}

// The first tile of a request that has places in the order.
DDTREE_PLAN int first_tile(const Plan& plan, int b, const Request& r) {
  return b < plan.request ? r.tiles : b == plan.request ? plan.tile : 0;
}

// What of a request has places in the order; its tiles count from first_tile. Each column is an order of its own.
DDTREE_PLAN Request rest_of(const Problem& p, const Plan& plan, int b) {
  Request r = request_of(p, b);
  r.tiles = plan.columns > 0 ? min(r.tiles, 1) : r.tiles - first_tile(plan, b, r);
  return r;
}

// Into how many chunks the steps of a request are cut. Where items may be cut again, chunks are of about a run, so that
// an item meets three blocks at most, and a block has at most one item that is a whole chunk but no whole tile. Short
// runs beside whole tiles leave the fewest splits when they follow each other down a tile.
DDTREE_PLAN int chunks_of(const Plan& plan, const Request& r) {
  if (plan.whole) return divide(r.steps + plan.run - 1, plan.run);
  if (plan.columns > 0 || (plan.tiles > 0 && plan.run <= kShortRun)) return 1;
  return max(1, min(divide(2 * r.steps + plan.run, 2 * plan.run), divide(r.steps, plan.run / 2 + 1)));
}

// The first step of a chunk of a tile of `steps`. The chunks' lengths differ by one at most, the longer ones first.
DDTREE_PLAN int chunk_begin(int steps, int chunks, int chunk) {
  const int length = divide(steps, chunks);
  return chunk * length + min(chunk, steps - chunks * length);
}

// Whole tiles of a request that a block can take, if its run is that long.
DDTREE_PLAN int tiles_of_run(const Plan& plan, const Request& r) { return divide(plan.run, max(r.steps, 1)); }

// Blocks that take whole items of a request.
DDTREE_PLAN int blocks_of(const Plan& plan, const Request& r) {
  const int together = max(tiles_of_run(plan, r), 1);
  return divide(r.tiles + together - 1, together) * chunks_of(plan, r);
}

// Places before the steps of a request.
DDTREE_PLAN int begin_cost(const Plan& plan) { return plan.columns > 0 ? kBeginCost : 0; }

// Places in the order that a request takes.
DDTREE_PLAN int places_of(const Plan& plan, const Request& r) {
  return plan.whole ? blocks_of(plan, r) * plan.run : r.tiles * (r.steps + begin_cost(plan));
}

struct Item {
  int tile, begin, end;  // steps
  int place;             // of its first step, from the request's first
};

// The item at place `from` of a request.
DDTREE_PLAN Item item_at(const Plan& plan, const Request& r, int from) {
  const int chunks = chunks_of(plan, r);
  if (plan.whole) {
    const int number = divide(from, plan.run);
    if (chunks == 1) {
      const int tile = divide(from - number * plan.run, r.steps);
      return {.tile = number * tiles_of_run(plan, r) + tile,
              .begin = 0,
              .end = r.steps,
              .place = number * plan.run + tile * r.steps};
    }
    const int chunk = divide(number, r.tiles);
    return {.tile = number - chunk * r.tiles,
            .begin = chunk_begin(r.steps, chunks, chunk),
            .end = chunk_begin(r.steps, chunks, chunk + 1),
            .place = number * plan.run};
  }
  // The chunk of the step reached if all tiles went side by side.
  const int step = divide(from, r.tiles), length = divide(r.steps, chunks), longer = r.steps - chunks * length;
  const bool early = step < longer * (length + 1);
  const int chunk = divide(early ? step : step - longer, early ? length + 1 : length);
  const int begin = chunk_begin(r.steps, chunks, chunk), end = chunk_begin(r.steps, chunks, chunk + 1);
  const int tile = divide(from - r.tiles * begin, end - begin);
  return {.tile = tile, .begin = begin, .end = end, .place = r.tiles * begin + tile * (end - begin)};
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_ORDER_H_
