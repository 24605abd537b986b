// The choice among the ways to share out the work, by what each should cost.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_CHOOSE_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_CHOOSE_H_

#include <limits.h>

#include "ffi/cuda/verify_attn/plan/find.h"
#include "ffi/cuda/verify_attn/plan/order.h"
#include "ffi/cuda/verify_attn/plan/run.h"
#include "ffi/cuda/verify_attn/problem.h"

namespace ddtree {

constexpr int kTries = 8;  // lengths of whole items

// What the choice of a plan is made by.
struct Totals {
  int steps, tiles;        // of all tiles
  int longest, shortest;  // steps of a tile
  int columns, places;    // tiles of every request that has any, or 0; places of a column
};

DDTREE_PLAN int even_run(int steps, int blocks) { return max(kMinRun, divide(steps + blocks - 1, blocks)); }

// How much longer than an equal run whole items may be.
template <bool kManyRows>
DDTREE_PLAN int most_longer(int even) {
  return kManyRows ? min(even / 2 + 2, kCutCost) : min(even / 8 + 2, 8);
}

// The length that warp `index` of kTries tries.
DDTREE_PLAN int tried_run(int even, int most, int index) {
  return even + divide(most * index + kTries - 2, kTries - 1);
}

// Steps that the ways should take, but for the beginning of the first tile. `together` are the most tiles of a block.
DDTREE_PLAN int cut_cost(const Totals& t, int even) {
  return even + kCutCost + kBeginCost * max(min(divide(even, max(t.shortest, 1)), t.tiles) - 1, 0);
}

DDTREE_PLAN int whole_cost(const Totals& t, int run, int together) {
  return run + kBeginCost * (together - 1) + (run < t.longest ? kCombineCost : 0);
}

// Whole tiles for each block, as many as there may be.
DDTREE_PLAN int rounds_of(const Totals& t, int even, int blocks) {
  return min(divide(even, max(t.longest, 1)), divide(t.tiles, blocks));
}

// `left` are the steps of a run after them.
DDTREE_PLAN int rounds_cost(const Totals& t, int rounds, int left) {
  return rounds * t.longest + left + kBeginCost * (rounds - 1) + (left > 0 ? kBeginCost + kCombineCost : 0);
}

DDTREE_PLAN int column_run(const Totals& t, int blocks) {
  const int runs = divide(blocks, t.columns);
  return max(kMinRun, divide(t.places + runs - 1, runs));
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
// order, longer runs cost as much as combining, and more code for the plan is microseconds.
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
    const Plan tried{.run = tried_run(even, most, warp), .whole = true};
    const int blocks_needed = count_blocks(p, tried, 0, lane);
    if (lane == 0) needed[warp] = blocks_needed;
  }
  __syncthreads();
  if (warp != 0) return;
  const Totals totals = sum_up(own, unequal);
  const int own_needed = lane < kTries ? needed[lane] : blocks + 1;
  const unsigned enough = __ballot_sync(~0u, own_needed <= blocks);
  Plan plan{.run = even, .whole = false};
  int places = totals.steps, cost = cut_cost(totals, even);
  if (enough != 0) {
    const int chosen = __ffs(enough) - 1;
    plan = {.run = tried_run(even, most, chosen), .whole = true};
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
        plan = {.run = even, .whole = false};
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
    const int rest_steps = totals.steps - taken, equal = divide(rest_steps + blocks - 1, blocks);
    const int left = max(kMinRun, equal), rounds_plan = rounds_cost(totals, rounds, rest_steps > 0 ? left : 0);
    if (rounds * totals.longest + left <= even + slack && (!kManyRows || rounds_plan < cost)) {
      plan = {.run = left,
              .whole = false,
              .tiles = rounds,
              .request = rest.request,
              .tile = rounds * blocks - rest.before};
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
      plan = {.run = columns_run, .whole = false, .columns = totals.columns};
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

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_CHOOSE_H_
