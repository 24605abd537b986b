// A block's run of the order, and the segments that it goes through.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_RUN_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_RUN_H_

#include "ffi/cuda/verify_attn/plan/order.h"
#include "ffi/cuda/verify_attn/plan/find.h"
#include "ffi/cuda/verify_attn/problem.h"

namespace ddtree {

// What a block does next. In shared memory, since registers are what a block lacks.
struct Segment {
  int request, tile, step, end_step, steps;
  int length, nodes;
  int split;  // of those that the block can leave: 0 continues an item, 1 is one, 2 begins one
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
    *s = {.request = run->tile_request,
          .tile = run->tile++,
          .step = 0,
          .end_step = r.steps,
          .steps = r.steps,
          .length = r.length,
          .nodes = r.nodes,
          .split = 1};
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
    s->split = step > item.begin ? 0 : end == item.end ? 1 : 2;
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
DDTREE_PLAN int run_of(const Plan& plan, int block) { return plan.columns > 0 ? divide(block, plan.columns) : block; }

// A block's run of places [at, end), the first and the last of which the two found requests hold.
DDTREE_PLAN void begin_run(const Problem& p, const Plan& plan, int block, int at, int end, const Found& first,
                           const Found& last, Run* run) {
  const int column = plan.columns > 0 ? block - run_of(plan, block) * plan.columns : 0;
  *run = {.plan = plan,
          .at = at,
          .left = end - at,
          .before = first.before,
          .request = first.request,
          .later_request = first.request,
          .later_at = at,
          .later_left = 0,
          .later_before = first.before,
          .column = column,
          .start = at,
          .end = end,
          .last_request = last.request,
          .last_before = last.before};
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

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_RUN_H_
