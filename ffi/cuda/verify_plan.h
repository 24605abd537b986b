// How the bfloat16 kernels of verify_attn share out their work.
//
// The work of a launch is the steps (64 or 32 cache rows) of all tiles (64 query rows: node and head, heads fastest).
// Every block computes from `lengths` and `num_nodes` what is its own, so the grid depends on nothing but the shapes.
//
// What limits a block that shares the card with 131 others is the L2 cache: all tiles of a request read the same rows,
// and each row should come from memory once. So blocks that run together must be near each other in the cache. The
// steps of a request are cut into chunks of about a block's run; the order of all work is request, chunk, tile, step.
// An item is a chunk of a tile. If that balances, a block takes whole items: one chunk, or as many whole tiles as fit
// in a run. Otherwise each takes an equal run of the order, which may cut the first and the last item; it does the last
// one's beginning first, so that at any time all blocks are about equally far in their chunks.
//
// An item that is not a whole tile, or was cut, leaves parts in the workspace, which a second launch merges.
#ifndef DDTREE_FFI_CUDA_VERIFY_PLAN_H_
#define DDTREE_FFI_CUDA_VERIFY_PLAN_H_

#include <stdint.h>

#include "ffi/cuda/verify_attn.h"
#include "ffi/ddtree.h"

// What concerns no warp as a whole is compiled for the host too, for its test.
#define DDTREE_PLAN __host__ __device__ __forceinline__

namespace ddtree {

constexpr int kMinRun = 2;  // steps below which another block costs more than it saves
constexpr int kPartFloats = kTileRows * (DDTREE_LATENT_DIM + 2);  // output, then maxima, then sums
constexpr int kBlockParts = 3;                                    // that a block can leave

// Places in the order of all work are 32-bit numbers; the launcher refuses problems with more than kMostSteps steps.
constexpr int64_t kMostSteps = 1 << 30;

struct Plan {
  int run;     // steps of a block, or the most of them
  bool whole;  // a block takes whole items; its places in the order are then `run`, used or not
};

struct Request {
  int length;  // rows that every node sees
  int nodes;   // real ones
  int tiles;
  int steps;   // of a tile
};

DDTREE_PLAN Request request_of(const Problem& p, int b) {
  Request r;
  r.length = min(max(p.lengths[b], 0), p.rows - p.nodes);
  r.nodes = min(max(p.num_nodes[b], 0), p.nodes);
  r.tiles = (r.nodes * p.heads + kTileRows - 1) / kTileRows;
  r.steps = (r.length + r.nodes + p.step_rows - 1) / p.step_rows;
  return r;
}

// Into how many chunks the steps of a request are cut. Where items may be cut again, chunks are of about a run, so that
// an item meets three blocks at most, and a block has at most one item that is a whole chunk but no whole tile.
DDTREE_PLAN int chunks_of(const Plan& plan, const Request& r) {
  if (plan.whole) return (r.steps + plan.run - 1) / plan.run;
  return max(1, min((2 * r.steps + plan.run) / (2 * plan.run), r.steps / (plan.run / 2 + 1)));
}

// The first step of a chunk. The chunks' lengths differ by one at most, the longer ones first.
DDTREE_PLAN int chunk_begin(const Request& r, int chunks, int chunk) {
  const int length = r.steps / chunks;
  return chunk * length + min(chunk, r.steps - chunks * length);
}

// Whole tiles of a request that a block can take, if its run is that long.
DDTREE_PLAN int tiles_of_run(const Plan& plan, const Request& r) { return plan.run / max(r.steps, 1); }

// Blocks that take whole items of a request.
DDTREE_PLAN int blocks_of(const Plan& plan, const Request& r) {
  const int together = max(tiles_of_run(plan, r), 1);
  return (r.tiles + together - 1) / together * chunks_of(plan, r);
}

// Places in the order that a request takes.
DDTREE_PLAN int places_of(const Plan& plan, const Request& r) {
  return plan.whole ? blocks_of(plan, r) * plan.run : r.tiles * r.steps;
}

// Sum of `value` over the lanes of a warp.
__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// Sum of `value` over the lanes up to this one.
__device__ __forceinline__ int prefix_sum(int value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

// All lanes of a warp call it and get the same; `places` becomes how many the order has.
__device__ __forceinline__ Plan make_plan(const Problem& p, int blocks, int lane, int* places) {
  int steps = 0;
  for (int b = lane; b < p.batch; b += 32) {
    const Request r = request_of(p, b);
    steps += r.tiles * r.steps;
  }
  *places = steps = warp_sum(steps);
  const Plan plan{max(kMinRun, (steps + blocks - 1) / blocks), false};
  // Whole items need longer runs, up to what cutting and merging costs. Eight lengths are tried, each by four lanes.
  const int most = min(plan.run / 8 + 2, 8);
  const Plan tried{plan.run + (most * (lane % 8) + 6) / 7, true};
  int needed = 0;
  for (int b = lane / 8; b < p.batch; b += 4) needed += blocks_of(tried, request_of(p, b));
  needed += __shfl_xor_sync(~0u, needed, 8);
  needed += __shfl_xor_sync(~0u, needed, 16);
  const unsigned enough = __ballot_sync(~0u, needed <= blocks);
  if (enough == 0) return plan;
  const int chosen = __ffs(enough) - 1;
  const Plan whole{__shfl_sync(~0u, tried.run, chosen), true};
  *places = __shfl_sync(~0u, needed, chosen) * whole.run;
  return whole;
}

// The requests that hold places `first` and `second`, and the places before them; `batch` if there is none. With
// `table`, the places before every request are written there.
struct Found {
  int request, before;
};
__device__ __forceinline__ void find_requests(const Problem& p, const Plan& plan, int first, int second, int lane,
                                              int* table, Found* first_found, Found* second_found) {
  int sum = 0;
  *first_found = *second_found = {p.batch, 0};
  const auto look = [&](int at, int b, int begin, int end, Found* found) {
    const unsigned here = __ballot_sync(~0u, begin <= at && at < end);
    if (here == 0) return;
    const int source = __ffs(here) - 1;
    *found = {b - lane + source, __shfl_sync(~0u, begin, source)};
  };
  for (int b = lane; b - lane < p.batch; b += 32) {
    const int places = b < p.batch ? places_of(plan, request_of(p, b)) : 0;
    const int end = sum + prefix_sum(places, lane), begin = end - places;
    look(first, b, begin, end, first_found);
    look(second, b, begin, end, second_found);
    if (table != nullptr && b < p.batch) table[b] = begin;
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
    const int number = from / plan.run;
    if (chunks == 1) {
      const int tile = (from - number * plan.run) / r.steps;
      return {number * tiles_of_run(plan, r) + tile, 0, r.steps, number * plan.run + tile * r.steps};
    }
    const int chunk = number / r.tiles;
    return {number - chunk * r.tiles, chunk_begin(r, chunks, chunk), chunk_begin(r, chunks, chunk + 1),
            number * plan.run};
  }
  // The chunk of the step reached if all tiles went side by side.
  const int step = from / r.tiles, length = r.steps / chunks, longer = r.steps - chunks * length;
  const int chunk = step < longer * (length + 1) ? step / (length + 1) : (step - longer) / length;
  const int begin = chunk_begin(r, chunks, chunk), end = chunk_begin(r, chunks, chunk + 1);
  const int tile = (from - r.tiles * begin) / (end - begin);
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
};

// Moves to the next item of the run; the segment's request is `batch` when nothing is left. One thread calls it.
DDTREE_PLAN void next_segment(const Problem& p, Run* run, Segment* s) {
  if (run->left <= 0 && run->later_left > 0) {
    run->request = run->later_request;
    run->at = run->later_at;
    run->left = run->later_left;
    run->before = run->later_before;
    run->later_left = 0;
  }
  const Plan plan = run->plan;
#pragma unroll 1
  for (int b = run->request; b < p.batch && run->left > 0; run->request = ++b) {
    const Request r = request_of(p, b);
    const int places = places_of(plan, r), from = run->at - run->before;
    if (from >= places) {
      run->before += places;
      continue;
    }
    s->request = b;
    s->steps = r.steps;
    s->length = r.length;
    s->nodes = r.nodes;
    const Item item = item_at(plan, r, from);
    const int step = item.begin + from - item.place;
    const int end = plan.whole ? item.end : min(item.end, step + run->left);
    s->tile = item.tile;
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

// A block's run of places [at, end), the first and the last of which the two found requests hold.
DDTREE_PLAN void begin_run(const Problem& p, const Plan& plan, int at, int end, const Found& first,
                                          const Found& last, Run* run) {
  *run = {plan, at, end - at, first.before, first.request, first.request, at, 0, first.before};
  if (plan.whole || at >= end) return;
  const Item item = item_at(plan, request_of(p, last.request), end - 1 - last.before);
  const int begun = last.before + item.place;
  if (begun > at && begun + item.end - item.begin > end) {
    run->later_left = begun - at;
    run->request = last.request;
    run->at = begun;
    run->left = end - begun;
    run->before = last.before;
  }
}

// A block's run. All lanes of one warp call it; lane 0 writes, and all of the first block's, what the merge needs.
__device__ __forceinline__ void start_run(const Problem& p, int block, int blocks, int lane, Run* run) {
  int places;
  const Plan plan = make_plan(p, blocks, lane, &places);
  const int at = plan.run * block, end = min(at + plan.run, places);
  Found first, last;
  find_requests(p, plan, at, end - 1, lane, block == 0 ? p.plan + 2 : nullptr, &first, &last);
  if (lane != 0) return;
  if (block == 0) {
    p.plan[0] = plan.run;
    p.plan[1] = plan.whole;
  }
  begin_run(p, plan, at, end, first, last, run);
}

// Where a block leaves one of its parts for the merge: 64 rows of output, then their maxima, then their sums.
DDTREE_PLAN float* part_of(const Problem& p, int block, int part) {
  return p.parts + (static_cast<int64_t>(kBlockParts) * block + part) * kPartFloats;
}

// The parts of a tile, as the merge goes through them.
struct Parts {
  Plan plan;
  Request request;
  int chunks, tile;
  int before;  // places before the request
  DDTREE_PLAN int most_blocks() const { return plan.whole ? 1 : 3; }  // that an item meets
  DDTREE_PLAN int count() const { return chunks * most_blocks(); }
  // Part i, or null where an item meets fewer blocks.
  DDTREE_PLAN const float* get(const Problem& p, int i) const {
    if (plan.whole) return part_of(p, before / plan.run + i * request.tiles + tile, 1);
    const int chunk = i / 3, number = i - chunk * 3;
    const int begin = chunk_begin(request, chunks, chunk), end = chunk_begin(request, chunks, chunk + 1);
    const int first = before + request.tiles * begin + tile * (end - begin);
    const int block = first / plan.run, last = (first + end - begin - 1) / plan.run;
    if (block + number > last) return nullptr;
    return part_of(p, block + number, number > 0 ? 0 : block == last ? 1 : 2);
  }
  // Whether one block did the whole tile, and so wrote its output.
  DDTREE_PLAN bool whole() const {
    if (chunks > 1) return false;
    const int first = before + tile * request.steps;
    return plan.whole || first / plan.run == (first + request.steps - 1) / plan.run;
  }
};

}  // namespace ddtree
#undef DDTREE_PLAN

#endif  // DDTREE_FFI_CUDA_VERIFY_PLAN_H_
