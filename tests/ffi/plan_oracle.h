// The plan of verify_attn's work by loops on the host, for what a warp does together on the device.
#ifndef DDTREE_TESTS_FFI_PLAN_ORACLE_H_
#define DDTREE_TESTS_FFI_PLAN_ORACLE_H_

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "ffi/cuda/verify_attn/plan/plan.h"

namespace ddtree {

// The request that holds place `at` of a plan's order, or the batch's size.
inline Found Find(const Problem& p, const Plan& plan, int at) {
  int before = 0;
  for (int b = 0; b < p.batch; ++b) {
    const int places = places_of(plan, rest_of(p, plan, b));
    if (at >= before && at < before + places) return {b, before};
    before += places;
  }
  return {p.batch, 0};
}

// The request of tile `tile` of all tiles, and which of its own that is.
inline std::pair<int, int> FindTile(const Problem& p, int tile) {
  for (int b = 0; b < p.batch; ++b) {
    const int tiles = request_of(p, b).tiles;
    if (tile < tiles) return {b, tile};
    tile -= tiles;
  }
  return {p.batch, 0};
}

// What start_run chooses.
inline Plan Choose(const Problem& p, int blocks, bool many_rows) {
  Totals t{};
  bool unequal = false;
  for (int b = 0; b < p.batch; ++b) add_request(request_of(p, b), &t, &unequal);
  if (unequal) t.columns = 0;
  const int even = even_run(t.steps, blocks), most = many_rows ? most_longer<true>(even) : most_longer<false>(even);
  const auto needed = [&](const Plan& plan) {
    int64_t all = 0;
    for (int b = 0; b < p.batch; ++b) all += blocks_of(plan, rest_of(p, plan, b));
    return all;
  };
  Plan plan{.run = even, .whole = false};
  int cost = cut_cost(t, even);
  bool enough = false;
  for (int i = 0; i < kTries && !enough; ++i) {
    const Plan tried{.run = tried_run(even, most, i), .whole = true};
    if (needed(tried) > blocks) continue;
    enough = true;
    int together = 1;
    for (int b = 0; b < p.batch; ++b) {
      const Request r = request_of(p, b);
      together = std::max(together, std::min(r.tiles, tiles_of_run(tried, r)));
    }
    const int whole = whole_cost(t, tried.run, together);
    if (many_rows && whole > cost) continue;
    plan = tried;
    cost = whole;
  }
  const int rounds = rounds_of(t, even, blocks);
  if (rounds > 0 && (many_rows || !enough)) {
    Plan tried{.run = 0, .whole = false, .tiles = rounds};
    std::tie(tried.request, tried.tile) = FindTile(p, rounds * blocks);
    int rest = 0;
    for (int b = 0; b < p.batch; ++b) {
      const Request r = rest_of(p, tried, b);
      rest += r.tiles * r.steps;
    }
    tried.run = std::max(kMinRun, (rest + blocks - 1) / blocks);
    const int own_cost = rounds_cost(t, rounds, rest > 0 ? tried.run : 0);
    const int slack = many_rows ? kRoundSlack : most / 2;
    if (rounds * t.longest + tried.run <= even + slack && (!many_rows || own_cost < cost)) {
      plan = tried;
      cost = own_cost;
      for (int longer = 0; many_rows && longer <= 2 && !plan.whole; ++longer) {
        Plan whole = tried;
        whole.whole = true;
        whole.run += longer;
        if (needed(whole) <= blocks) plan = whole;
      }
    }
  }
  if (many_rows && t.columns > 0 && t.columns <= blocks && column_run(t, blocks) + kColumnCost < cost) {
    plan = {.run = column_run(t, blocks), .whole = false, .columns = t.columns};
  }
  return plan;
}

inline std::string Name(const Plan& plan) {
  if (plan.columns > 0) return "columns";
  return std::string(plan.tiles > 0 ? "tiles then " : "") + (plan.whole ? "items" : "runs");
}

}  // namespace ddtree

#endif  // DDTREE_TESTS_FFI_PLAN_ORACLE_H_
