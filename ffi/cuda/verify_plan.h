// How the bfloat16 kernels of verify_attn share out their work.
//
// The work of a launch is the steps (64 or 32 cache rows) of all tiles (64 query rows: node and head, heads fastest).
// Every block computes from `lengths` and `num_nodes` what is its own, so the grid depends on nothing but the shapes.
//
// What limits a block that shares the card with 131 others is the L2 cache: all tiles of a request read the same rows,
// and each row should come from memory once. So blocks that run together must be near each other in the cache. The
// steps of a request are cut into chunks of about a block's run; the order of all work is request, chunk, tile, step.
// An item is a chunk of a tile. There are four ways to share them out:
//
// - A block takes whole items: one chunk, or as many whole tiles of a request as fit in a run.
// - Where all tiles are about equally long and there is one for each block, every block first takes the same number of
//   whole tiles. What is left becomes whole items if they are hardly longer than an equal run, else it is cut.
// - Where all requests have the same number of tiles, tile t of all requests is a column, whose steps, request after
//   request, are cut into equal runs. The blocks with the same run of all columns read the same rows together. Blocks
//   that are no multiple of the tiles are left over.
// - Everything is cut into equal runs of the order. A run may cut its first and its last item; a block does the last
//   one's beginning first, so that at any time all blocks are about equally far in their chunks.
//
// What should take the fewest steps is taken, the earlier one of equals. To begin a further tile counts as kBeginCost
// steps, which columns have as places before each request's own; a merge as kMergeCost; that runs of a column meet two
// items and leave parts as kColumnCost; that runs of the order, two or three and many, as kCutCost. Those were measured
// with the Hopper kernel's steps of 64 rows; the portable one's of 32 take about as long.
//
// An item that is not a whole tile, or was cut, leaves parts in the workspace, which a second launch merges by a list
// of the tiles that are cut.
//
// Every block makes the plan before it can load anything, in each call with instructions that no cache holds yet. So
// what counts is how many divisions follow one another, and how much code there is: no loop over requests is unrolled.
#ifndef DDTREE_FFI_CUDA_VERIFY_PLAN_H_
#define DDTREE_FFI_CUDA_VERIFY_PLAN_H_

#include <limits.h>
#include <stdint.h>

#include "ffi/cuda/verify_attn.h"
#include "ffi/ddtree.h"

// What concerns no warp as a whole is compiled for the host too, for its test.
#define DDTREE_PLAN __host__ __device__ __forceinline__

namespace ddtree {

constexpr int kMinRun = 2;      // steps below which another block costs more than it saves
constexpr int kShortRun = 32;   // steps in which blocks cannot get far from each other
constexpr int kBlockParts = 3;  // that a block can leave
constexpr int kCutCost = 12, kColumnCost = 4, kBeginCost = 5, kMergeCost = 2;  // in steps
constexpr int kRoundSlack = 4;  // by which whole tiles and the rest may be longer than an equal run

// What a part says of a row. The output stands for itself times `scale`, one for each half of the columns.
struct PartRow {
  float maximum, sum, scale[2];
};

// Bytes of a part: 64 rows of output, then what is said of them.
template <typename Number>
constexpr int kPartBytes = kTileRows * (DDTREE_LATENT_DIM * sizeof(Number) + sizeof(PartRow));

// Places in the order of all work are 32-bit numbers; the launcher refuses problems with more than kMostSteps steps.
constexpr int64_t kMostSteps = 1 << 30;

// a / b of numbers that are not negative: of signed numbers it is twice the instructions.
DDTREE_PLAN int over(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b)); }

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
// runs beside whole tiles leave the fewest parts when they follow each other down a tile.
DDTREE_PLAN int chunks_of(const Plan& plan, const Request& r) {
  if (plan.whole) return over(r.steps + plan.run - 1, plan.run);
  if (plan.columns > 0 || (plan.tiles > 0 && plan.run <= kShortRun)) return 1;
  return max(1, min(over(2 * r.steps + plan.run, 2 * plan.run), over(r.steps, plan.run / 2 + 1)));
}

// The first step of a chunk of a tile of `steps`. The chunks' lengths differ by one at most, the longer ones first.
DDTREE_PLAN int chunk_begin(int steps, int chunks, int chunk) {
  const int length = over(steps, chunks);
  return chunk * length + min(chunk, steps - chunks * length);
}

// Whole tiles of a request that a block can take, if its run is that long.
DDTREE_PLAN int tiles_of_run(const Plan& plan, const Request& r) { return over(plan.run, max(r.steps, 1)); }

// Blocks that take whole items of a request.
DDTREE_PLAN int blocks_of(const Plan& plan, const Request& r) {
  const int together = max(tiles_of_run(plan, r), 1);
  return over(r.tiles + together - 1, together) * chunks_of(plan, r);
}

// Places before the steps of a request.
DDTREE_PLAN int begin_cost(const Plan& plan) { return plan.columns > 0 ? kBeginCost : 0; }

// Places in the order that a request takes.
DDTREE_PLAN int places_of(const Plan& plan, const Request& r) {
  return plan.whole ? blocks_of(plan, r) * plan.run : r.tiles * (r.steps + begin_cost(plan));
}

// Sum and greatest of `value` over the lanes of a warp.
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(~0u, value); }

// Sum of `value` over the lanes up to this one.
__device__ __forceinline__ int prefix_sum(int value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

// The request that holds something, and what is before the request; `batch` if there is none.
struct Found {
  int request, before;
};

// Looks whether one of a warp's requests, `b` of this lane, holds `at`; the lane's own has [begin, end).
__device__ __forceinline__ void look(int at, int b, int lane, int begin, int end, Found* found) {
  const unsigned here = __ballot_sync(~0u, begin <= at && at < end);
  if (here == 0) return;
  const int source = __ffs(here) - 1;
  *found = {b - lane + source, __shfl_sync(~0u, begin, source)};
}

// The requests that hold tiles `first` and `second` of all tiles. `steps` becomes those of the tiles before `second`.
__device__ __forceinline__ void find_tiles(const Problem& p, int first, int second, int lane, Found* first_found,
                                           Found* second_found, int* steps) {
  *first_found = *second_found = {p.batch, 0};
  int sum = 0, own_steps = 0;
#pragma unroll 1
  for (int b = lane; b - lane < p.batch; b += 32) {
    const Request r = b < p.batch ? request_of(p, b) : Request{};
    const int end = sum + prefix_sum(r.tiles, lane), begin = end - r.tiles;
    look(first, b, lane, begin, end, first_found);
    look(second, b, lane, begin, end, second_found);
    own_steps += min(max(second - begin, 0), r.tiles) * r.steps;
    sum = __shfl_sync(~0u, end, 31);
  }
  *steps = warp_sum(own_steps);
}

// The requests that hold places `first` and `second` of the order.
__device__ __forceinline__ void find_places(const Problem& p, const Plan& plan, int first, int second, int lane,
                                            Found* first_found, Found* second_found) {
  *first_found = *second_found = {p.batch, 0};
  int sum = 0;
#pragma unroll 1
  for (int b = lane; b - lane < p.batch; b += 32) {
    const int places = b < p.batch ? places_of(plan, rest_of(p, plan, b)) : 0;
    const int end = sum + prefix_sum(places, lane), begin = end - places;
    look(first, b, lane, begin, end, first_found);
    look(second, b, lane, begin, end, second_found);
    sum = __shfl_sync(~0u, end, 31);
  }
}

struct Item {
  int tile, begin, end;  // steps
  int place;             // of its first step, from the request's first
};

// The item at place `from` of a request.
DDTREE_PLAN Item item_at(const Plan& plan, const Request& r, int from) {
  const int chunks = chunks_of(plan, r);
  if (plan.whole) {
    const int number = over(from, plan.run);
    if (chunks == 1) {
      const int tile = over(from - number * plan.run, r.steps);
      return {number * tiles_of_run(plan, r) + tile, 0, r.steps, number * plan.run + tile * r.steps};
    }
    const int chunk = over(number, r.tiles);
    return {number - chunk * r.tiles, chunk_begin(r.steps, chunks, chunk), chunk_begin(r.steps, chunks, chunk + 1),
            number * plan.run};
  }
  // The chunk of the step reached if all tiles went side by side.
  const int step = over(from, r.tiles), length = over(r.steps, chunks), longer = r.steps - chunks * length;
  const bool early = step < longer * (length + 1);
  const int chunk = over(early ? step : step - longer, early ? length + 1 : length);
  const int begin = chunk_begin(r.steps, chunks, chunk), end = chunk_begin(r.steps, chunks, chunk + 1);
  const int tile = over(from - r.tiles * begin, end - begin);
  return {tile, begin, end, r.tiles * begin + tile * (end - begin)};
}

// What a block does next. In shared memory, since registers are what a block lacks.
struct Segment {
  int request, tile, step, end_step, steps;
  int length, nodes;
  int part;  // of those that the block can leave: 0 continues an item, 1 is one, 2 begins one
};

// What is left of a block's run.
struct Run {
  Plan plan;
  int at, left, before;  // places: next, still to do, and before the request
  int request;
  // The same of what comes after the item that was begun first.
  int later_request, later_at, later_left, later_before;
  // Whole tiles that come before all that, and the next of them.
  int tiles, tile_request, tile;
  int column;  // of the block, or 0
  int start, end;                  // of the run's places
  int last_request, last_before;  // the request that has the last of them, and the places before it
  int cuttable;                   // tiles that have places
};

constexpr int kTries = 8;  // lengths of whole items

// Moves to the next item of the run; the segment's request is `batch` when nothing is left. One thread calls it.
DDTREE_PLAN void next_segment(const Problem& p, Run* run, Segment* s) {
  if (run->tiles > 0) {
    --run->tiles;
    // Requests may have no tile.
    Request r = request_of(p, run->tile_request);
    while (run->tile >= r.tiles) {
      r = request_of(p, ++run->tile_request);
      run->tile = 0;
    }
    *s = {run->tile_request, run->tile++, 0, r.steps, r.steps, r.length, r.nodes, 1};
    return;
  }
  if (run->left <= 0 && run->later_left > 0) {
    run->request = run->later_request;
    run->at = run->later_at;
    run->left = run->later_left;
    run->before = run->later_before;
    run->later_left = 0;
  }
  const Plan& plan = run->plan;
#pragma unroll 1
  for (int b = run->request; b < p.batch && run->left > 0; run->request = ++b) {
    const Request r = rest_of(p, plan, b);
    const int places = places_of(plan, r);
    if (run->at - run->before >= places) {
      run->before += places;
      continue;
    }
    const int passed = max(begin_cost(plan) - (run->at - run->before), 0);
    run->at += passed;
    run->left -= passed;
    if (run->left <= 0) break;
    const int from = run->at - run->before - begin_cost(plan);  // of the request's steps
    s->request = b;
    s->steps = r.steps;
    s->length = r.length;
    s->nodes = r.nodes;
    const Item item = item_at(plan, r, from);
    const int step = item.begin + from - item.place;
    const int end = plan.whole ? item.end : min(item.end, step + run->left);
    s->tile = item.tile + (b == plan.request ? plan.tile : 0) + run->column;
    s->step = step;
    s->end_step = end;
    s->part = step > item.begin ? 0 : end == item.end ? 1 : 2;
    const int taken = end - step;
    // A run of whole items ends after a chunk, and where no further tile fits, or none is left.
    const bool last = plan.whole && (taken < r.steps || item.tile + 1 == r.tiles || taken * 2 > run->left);
    run->at += taken;
    run->left = last ? 0 : run->left - taken;
    return;
  }
  run->left = 0;
  s->request = p.batch;
}

// Which run of the plan's a block has: the place where it begins, by plan.run.
DDTREE_PLAN int run_of(const Plan& plan, int block) { return plan.columns > 0 ? over(block, plan.columns) : block; }

// A block's run of places [at, end), the first and the last of which the two found requests hold.
DDTREE_PLAN void begin_run(const Problem& p, const Plan& plan, int block, int at, int end, const Found& first,
                           const Found& last, Run* run) {
  const int column = plan.columns > 0 ? block - run_of(plan, block) * plan.columns : 0;
  *run = {plan, at, end - at, first.before, first.request, first.request, at, 0, first.before, 0, 0, 0, column,
          at, end, last.request, last.before, 0};
  if (plan.whole || plan.columns > 0 || at >= end) return;
  const Item item = item_at(plan, rest_of(p, plan, last.request), end - 1 - last.before);
  const int begun = last.before + item.place;
  if (begun > at && begun + item.end - item.begin > end) {
    run->later_left = begun - at;
    run->request = last.request;
    run->at = begun;
    run->left = end - begun;
    run->before = last.before;
  }
}

// What the choice of a plan is made by.
struct Totals {
  int steps, tiles;        // of all tiles
  int longest, shortest;  // steps of a tile
  int columns, places;    // tiles of every request that has any, or 0; places of a column
};

DDTREE_PLAN int even_run(int steps, int blocks) { return max(kMinRun, over(steps + blocks - 1, blocks)); }

// How much longer than an equal run whole items may be.
template <bool kManyRows>
DDTREE_PLAN int most_longer(int even) {
  return kManyRows ? min(even / 2 + 2, kCutCost) : min(even / 8 + 2, 8);
}

// The length that warp `index` of kTries tries.
DDTREE_PLAN int tried_run(int even, int most, int index) {
  return even + over(most * index + kTries - 2, kTries - 1);
}

// Steps that the ways should take, but for the beginning of the first tile. `together` are the most tiles of a block.
DDTREE_PLAN int cut_cost(const Totals& t, int even) {
  return even + kCutCost + kBeginCost * max(min(over(even, max(t.shortest, 1)), t.tiles) - 1, 0);
}

DDTREE_PLAN int whole_cost(const Totals& t, int run, int together) {
  return run + kBeginCost * (together - 1) + (run < t.longest ? kMergeCost : 0);
}

// Whole tiles for each block, as many as there may be.
DDTREE_PLAN int rounds_of(const Totals& t, int even, int blocks) {
  return min(over(even, max(t.longest, 1)), over(t.tiles, blocks));
}

// `left` are the steps of a run after them.
DDTREE_PLAN int rounds_cost(const Totals& t, int rounds, int left) {
  return rounds * t.longest + left + kBeginCost * (rounds - 1) + (left > 0 ? kBeginCost + kMergeCost : 0);
}

DDTREE_PLAN int column_run(const Totals& t, int blocks) {
  const int runs = over(blocks, t.columns);
  return max(kMinRun, over(t.places + runs - 1, runs));
}

// Adds a request; `unequal` becomes true if requests have different numbers of tiles.
DDTREE_PLAN void add_request(const Request& r, Totals* t, bool* unequal) {
  if (r.tiles == 0) return;
  t->steps += r.tiles * r.steps;
  t->tiles += r.tiles;
  t->longest = max(t->longest, r.steps);
  t->shortest = t->shortest > 0 ? min(t->shortest, r.steps) : r.steps;
  t->places += r.steps + kBeginCost;
  *unequal |= t->columns > 0 && r.tiles != t->columns;
  t->columns = r.tiles;
}

// The same of all lanes' requests.
__device__ __forceinline__ Totals sum_up(const Totals& own, bool unequal) {
  Totals t;
  t.steps = warp_sum(own.steps);
  t.tiles = warp_sum(own.tiles);
  t.longest = warp_max(own.longest);
  t.shortest = static_cast<int>(__reduce_min_sync(~0u, own.shortest > 0 ? own.shortest : INT_MAX));
  t.columns = warp_max(own.columns);
  t.places = warp_sum(own.places);
  if (__any_sync(~0u, unequal || (own.columns > 0 && own.columns != t.columns))) t.columns = 0;
  return t;
}

// Blocks that take the whole items of all requests from `first` on, by all lanes.
__device__ __forceinline__ int count_blocks(const Problem& p, const Plan& plan, int first, int lane) {
  int own = 0;
#pragma unroll 1
  for (int b = first + lane; b < p.batch; b += 32) own += blocks_of(plan, rest_of(p, plan, b));
  return warp_sum(own);
}

// Makes the plan and the block's run. All threads call it, eight warps at least, and `run` is there when they are
// together again; `needed` is shared memory for kTries.
//
// Without kManyRows it is for a kernel whose requests have one tile, which memory limits: there columns are runs of the
// order, longer runs cost as much as merging, and more code for the plan is microseconds.
template <bool kManyRows>
__device__ __forceinline__ void start_run(const Problem& p, int* needed, Run* run) {
  const int block = blockIdx.x, blocks = gridDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Totals own{};
  bool unequal = false;
  int even = 0, most = 0;
  if (warp < kTries) {
#pragma unroll 1
    for (int b = lane; b < p.batch; b += 32) add_request(request_of(p, b), &own, &unequal);
    even = even_run(warp_sum(own.steps), blocks);
    most = most_longer<kManyRows>(even);
    // Each of eight warps tries one length of whole items.
    const int blocks_needed = count_blocks(p, {tried_run(even, most, warp), true}, 0, lane);
    if (lane == 0) needed[warp] = blocks_needed;
  }
  __syncthreads();
  if (warp != 0) return;
  const Totals totals = sum_up(own, unequal);
  const int own_needed = lane < kTries ? needed[lane] : blocks + 1;
  const unsigned enough = __ballot_sync(~0u, own_needed <= blocks);
  Plan plan{even, false};
  int places = totals.steps, cost = cut_cost(totals, even);
  if (enough != 0) {
    const int chosen = __ffs(enough) - 1;
    plan = {tried_run(even, most, chosen), true};
    places = __shfl_sync(~0u, own_needed, chosen) * plan.run;
    if (kManyRows) {
      int together = 1;
#pragma unroll 1
      for (int b = lane; b < p.batch; b += 32) {
        const Request r = request_of(p, b);
        together = max(together, min(r.tiles, tiles_of_run(plan, r)));
      }
      const int whole = whole_cost(totals, plan.run, warp_max(together));
      if (whole <= cost) {
        cost = whole;
      } else {
        plan = {even, false};
        places = totals.steps;
      }
    }
  }
  Found first_tile_of{};
  const int rounds = rounds_of(totals, even, blocks), slack = kManyRows ? kRoundSlack : most / 2;
  if (rounds > 0 && (kManyRows ? rounds_cost(totals, rounds, 0) < cost : enough == 0)) {
    Found rest, first;
    int taken;
    find_tiles(p, rounds * block, rounds * blocks, lane, &first, &rest, &taken);
    const int rest_steps = totals.steps - taken, equal = over(rest_steps + blocks - 1, blocks);
    const int left = max(kMinRun, equal), rounds_plan = rounds_cost(totals, rounds, rest_steps > 0 ? left : 0);
    if (rounds * totals.longest + left <= even + slack && (!kManyRows || rounds_plan < cost)) {
      plan = {left, false, rounds, rest.request, rounds * blocks - rest.before};
      places = rest_steps;
      cost = rounds_plan;
      first_tile_of = first;
      // Blocks whose run goes on into another tile would be the last to end, if no whole items fit that are as long.
#pragma unroll 1
      for (int longer = 0; kManyRows && longer <= 2; ++longer) {
        Plan tried = plan;
        tried.whole = true;
        tried.run += longer;
        const int blocks_needed = count_blocks(p, tried, rest.request, lane);
        if (blocks_needed > blocks) continue;
        plan = tried;
        places = blocks_needed * tried.run;
        break;
      }
    }
  }
  if (kManyRows && totals.columns > 0 && totals.columns <= blocks) {
    const int columns_run = column_run(totals, blocks);
    if (columns_run + kColumnCost < cost) {
      plan = {columns_run, false, 0, 0, 0, totals.columns};
      places = totals.places;
      first_tile_of = {};
    }
  }
  const int at = plan.run * run_of(plan, block), end = min(at + plan.run, places);
  Found first, last;
  find_places(p, plan, at, end - 1, lane, &first, &last);
  if (lane != 0) return;
  begin_run(p, plan, block, at, end, first, last, run);
  run->cuttable = totals.tiles - plan.tiles * blocks;
  run->tiles = plan.tiles;
  run->tile_request = first_tile_of.request;
  run->tile = plan.tiles * block - first_tile_of.before;
}

// Where a block leaves one of its parts for the merge.
template <typename Number>
DDTREE_PLAN uint8_t* part_of(const Problem& p, int block, int part) {
  return p.parts + static_cast<int64_t>(kBlockParts * block + part) * kPartBytes<Number>;
}

// The parts of a tile, as the merge goes through them.
struct Parts {
  int run, whole;     // of the plan
  int tiles, before;  // of the request with places in the order, and the places before its steps
  int steps, chunks;  // of the tile
  int tile;           // counted from first_tile; in columns it is 0
  int columns, column;  // run r of the plan is block r * columns + column's; 1 and 0 without columns
  // Upper bounds of the blocks that an item meets, and of the parts.
  DDTREE_PLAN int most_blocks() const { return whole ? 1 : over(over(steps + chunks - 1, chunks) + run - 2, run) + 1; }
  DDTREE_PLAN int count() const { return chunks * most_blocks(); }
  // Part i: its block times kBlockParts, and which of the block's. -1 where an item meets fewer blocks.
  DDTREE_PLAN int get(int i) const {
    if (whole) return (over(before, run) + i * tiles + tile) * kBlockParts + 1;
    const int chunk = over(i, most_blocks()), number = i - chunk * most_blocks();
    const int begin = chunk_begin(steps, chunks, chunk), end = chunk_begin(steps, chunks, chunk + 1);
    const int first = before + tiles * begin + tile * (end - begin);
    const int block = over(first, run), last = over(first + end - begin - 1, run);
    if (block + number > last) return -1;
    return ((block + number) * columns + column) * kBlockParts + (number > 0 ? 0 : block == last ? 1 : 2);
  }
  // Whether a tile that is not of chunks lies within a run, whose block then wrote its output.
  DDTREE_PLAN bool uncut() const {
    const int first = before + tile * steps;
    return chunks == 1 && (whole || over(first, run) == over(first + steps - 1, run));
  }
};

// The parts of a tile; `rest` is what of its request has places, `before` are the places before the request.
DDTREE_PLAN Parts parts_of(const Plan& plan, const Request& rest, int before, int tile) {
  const int steps_before = before + begin_cost(plan), chunks = chunks_of(plan, rest);
  if (plan.columns > 0) {
    return {plan.run, plan.whole, rest.tiles, steps_before, rest.steps, chunks, 0, plan.columns, tile};
  }
  return {plan.run, plan.whole, rest.tiles, steps_before, rest.steps, chunks, tile, 1, 0};
}

// What the merge must know of a tile that may have been cut.
struct alignas(16) CutTile {
  Parts parts;
  int request, first_row, rows;  // of the request's rows; none if the tile was not cut
};

struct alignas(16) CutTiles {
  int count;       // of `tiles`
  int most_parts;  // of one, at most
  CutTile tiles[1];
};

// Tile `tile` of what of a request has places; no rows if it was not cut. `before` are the places before the request.
DDTREE_PLAN CutTile cut_tile(const Problem& p, const Plan& plan, const Request& rest, int before, int request,
                             int tile) {
  const Parts parts = parts_of(plan, rest, before, tile);
  const int first_row = (tile + first_tile(plan, request, request_of(p, request))) * kTileRows;
  return {parts, request, first_row, parts.uncut() ? 0 : min(rest.nodes * p.heads - first_row, kTileRows)};
}

// The tile that the end of a block's run cuts, if the block has its first part and the tile is not of chunks; else one
// of no rows. It is for plans that are not of whole items.
DDTREE_PLAN CutTile cut_at_end(const Problem& p, const Run& run) {
  const Plan& plan = run.plan;
  if (run.last_request >= p.batch) return {};
  const Request rest = rest_of(p, plan, run.last_request);
  const int steps_before = run.last_before + begin_cost(plan), from = run.end - 1 - steps_before;
  if (from < 0 || rest.steps == 0 || chunks_of(plan, rest) > 1) return {};
  const int number = over(from, rest.steps), begin = steps_before + number * rest.steps;
  if (begin < run.start || begin + rest.steps <= run.end) return {};
  return cut_tile(p, plan, rest, run.last_before, run.last_request, number + run.column);
}

// Lists the tiles that were cut. Those of chunks all were. For others there is a place each, or if there are more tiles
// than blocks, one for each block, for what the end of its run cuts. The blocks share the list out, and each its own
// between `warps` warps, of which this is `warp`.
__device__ __forceinline__ void list_cut_tiles(const Problem& p, const Run& run, int warp, int warps, int lane) {
  CutTiles* list = p.cut_tiles;
  const Plan& plan = run.plan;
  const int blocks = gridDim.x, ends = !plan.whole && run.cuttable > blocks ? blocks : 0;
  if (ends > 0 && warp == 0 && lane == 0) list->tiles[blockIdx.x] = cut_at_end(p, run);
  __syncwarp();
  for (int index = blockIdx.x * warps + warp, count = index + 1; index < count; index += gridDim.x * warps) {
    int places = 0, most_parts = 0;
    count = 0;
#pragma unroll 1
    for (int b = lane; b - lane < p.batch; b += 32) {
      const Request rest = b < p.batch ? rest_of(p, plan, b) : Request{};
      const int own_places = b < p.batch ? places_of(plan, rest) : 0;
      const int before = places + prefix_sum(own_places, lane) - own_places;
      const Parts parts = parts_of(plan, rest, before, 0);
      const bool listed = parts.chunks > 1 || (!plan.whole && ends == 0);
      const int own = listed ? rest.tiles * max(plan.columns, 1) : 0;
      const int end = count + prefix_sum(own, lane), tile = index - (end - own);
      if (rest.tiles > 0 && (own > 0 || !plan.whole)) most_parts = max(most_parts, parts.count());
      if (tile >= 0 && tile < own) {
        list->tiles[ends + index] = cut_tile(p, plan, rest, before, b, tile);
      }
      count = __shfl_sync(~0u, end, 31);
      places = __shfl_sync(~0u, before + own_places, 31);
    }
    most_parts = warp_max(most_parts);
    if (index == 0 && lane == 0) {
      list->count = ends + count;
      list->most_parts = most_parts;
    }
  }
}

}  // namespace ddtree
#undef DDTREE_PLAN

#endif  // DDTREE_FFI_CUDA_VERIFY_PLAN_H_
