// Whether the plan of verify_attn's work does all of it once, evenly, and what combines them finds what was left:
// random problems, and those of tests/gpu, on the host. What a warp does together on the device (start_run,
// list_split_tiles) is done by loops here; plan_on_warps_test.cc runs that itself.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/ffi/plan_oracle.h"

using namespace ddtree;

namespace {

#define EXPECT(condition)                                                          \
  if (!(condition)) {                                                              \
    std::printf("problem %d, %d blocks: %s\n", problem, blocks, #condition);       \
    return false;                                                                  \
  }

// `load` becomes the most of a block, in steps and kBeginCost for each of its segments.
bool Check(const Problem& p, const Plan& plan, int blocks, int problem, bool* cut, int* load) {
  int places = 0, longest = 0, max_tiles = 0;
  for (int b = 0; b < p.batch; ++b) {
    max_tiles = std::max(max_tiles, request_of(p, b).tiles);
    places += places_of(plan, rest_of(p, plan, b));
    longest = std::max(longest, request_of(p, b).steps);
  }
  EXPECT(static_cast<int64_t>(plan.run) * (plan.columns > 0 ? blocks / plan.columns : blocks) >= places);
  std::map<std::pair<int, int>, std::vector<int>> done;         // of a tile: how often each step
  std::map<std::pair<int, int>, std::set<int>> left;  // its splits
  std::set<int> all;
  std::set<std::pair<int, int>> whole, listed;
  *load = 0;
  for (int block = 0; block < blocks; ++block) {
    const int number = plan.columns > 0 ? block / plan.columns : block;
    const int at = plan.run * number, end = std::min(at + plan.run, places);
    Run run;
    begin_run(p, plan, block, at, end, Find(p, plan, at), Find(p, plan, end - 1), &run);
    run.tiles = plan.tiles;
    std::tie(run.tile_request, run.tile) = FindTile(p, plan.tiles * block);
    if (!plan.whole) {
      const SplitTile tile = split_at_end(p, run);
      if (tile.rows > 0) EXPECT(listed.insert({tile.request, tile.first_row / kTileRows}).second);
    }
    int steps = 0, segments = 0;
    for (Segment s;;) {
      next_segment(p, &run, &s);
      if (s.request == p.batch) break;
      const Request r = request_of(p, s.request);
      const std::pair<int, int> tile{s.request, s.tile};
      EXPECT(s.tile >= 0 && s.tile < r.tiles && s.step >= 0 && s.step < s.end_step && s.end_step <= r.steps);
      EXPECT(s.steps == r.steps && s.length == r.length && s.nodes == r.nodes);
      done[tile].resize(r.steps);
      for (int step = s.step; step < s.end_step; ++step) ++done[tile][step];
      steps += s.end_step - s.step;
      ++segments;
      if (s.step == 0 && s.end_step == r.steps) {
        whole.insert(tile);
      } else {
        EXPECT(s.split >= 0 && s.split < kBlockSplits);
        const int split = block * kBlockSplits + s.split;
        EXPECT(all.insert(split).second);  // a block leaves none twice
        left[tile].insert(split);
      }
    }
    EXPECT(steps <= plan.tiles * longest + plan.run);
    *load = std::max(*load, steps + kBeginCost * segments);
  }
  for (int b = 0; b < p.batch; ++b) {
    const Request r = request_of(p, b), rest = rest_of(p, plan, b);
    int before = 0;
    for (int other = 0; other < b; ++other) before += places_of(plan, rest_of(p, plan, other));
    for (int t = 0; t < r.tiles; ++t) {
      EXPECT(done[std::make_pair(b, t)] == std::vector<int>(r.steps, 1));
      const bool is_whole = whole.count({b, t}) > 0;
      if (t < first_tile(plan, b, r)) {
        EXPECT(is_whole);
        continue;
      }
      const Splits splits = splits_of(plan, rest, before, t - first_tile(plan, b, r));
      if (splits.chunks > 1) EXPECT(listed.insert({b, t}).second);
      EXPECT((listed.count({b, t}) == 0) == is_whole);
      if (is_whole) continue;
      std::set<int> found;
      for (int i = 0; i < splits.count(); ++i) {
        if (const int split = splits.get(i); split >= 0) EXPECT(found.insert(split).second);
      }
      EXPECT(found == (left[std::make_pair(b, t)]));
    }
  }
  EXPECT(static_cast<int>(listed.size()) <= blocks + p.batch * max_tiles);
  *cut = !plan.whole && !all.empty();
  return true;
}

// The sizes of tests/gpu/verify_attn_test.py take the ways that they are named after on an H200, in both kernels.
bool NamesAreRight() {
  struct Sizes {
    const char* name;
    int heads;
    std::vector<int32_t> lengths, nodes;
  };
  std::vector<int32_t> many(48), few_long(20, 50);
  for (int i = 0; i < 48; ++i) many[i] = 100 + 50 * i;
  for (int i = 0; i < 4; ++i) few_long[i * 5] = 6000;
  const Sizes all[] = {{"runs", 64, {1967, 1960, 1953}, {33, 30, 7}},
                       {"columns", 8, many, std::vector<int32_t>(48, 17)},
                       {"columns", 8, few_long, std::vector<int32_t>(20, 17)},
                       {"tiles then items", 64, std::vector<int32_t>(8, 1000), std::vector<int32_t>(8, 17)},
                       {"tiles then runs", 64, std::vector<int32_t>(8, 990), std::vector<int32_t>(8, 25)}};
  bool right = true;
  for (const Sizes& sizes : all) {
    for (const int step_rows : {64, 32}) {
      Problem p{};
      p.batch = static_cast<int>(sizes.lengths.size()), p.nodes = sizes.nodes[0], p.heads = sizes.heads;
      p.rows = 10'000, p.step_rows = step_rows, p.lengths = sizes.lengths.data(), p.num_nodes = sizes.nodes.data();
      const std::string name = Name(Choose(p, 132, true));
      if (name == sizes.name) continue;
      std::printf("%s of steps of %d rows are %s\n", sizes.name, step_rows, name.c_str());
      right = false;
    }
  }
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  if (!NamesAreRight()) return 1;
  std::mt19937 generator(static_cast<unsigned>(std::atoi(argv[1])));
  const auto draw = [&](int low, int high) { return low + static_cast<int>(generator() % (high - low + 1)); };
  int load = 0;
  int cuts = 0, mixed = 0, mixed_whole = 0, columns_cut = 0, plans = 0;
  for (int problem = 0; problem < std::atoi(argv[2]); ++problem) {
    Problem p{};
    const bool uniform = draw(0, 3) == 0;
    p.batch = draw(1, draw(0, 1) ? 4 : 40), p.nodes = draw(0, 2) ? draw(1, 70) : 1;
    p.heads = 1 << draw(0, 6), p.rows = p.nodes + draw(0, draw(0, 1) ? 300 : 20000), p.step_rows = draw(0, 1) ? 64 : 32;
    std::vector<int32_t> lengths(p.batch), nodes(p.batch);
    for (int b = 0; b < p.batch; ++b) {
      lengths[b] = uniform ? p.rows : draw(-2, p.rows + 2);
      nodes[b] = uniform || draw(0, 3) ? p.nodes : draw(0, p.nodes);
    }
    p.lengths = lengths.data(), p.num_nodes = nodes.data();
    const int blocks = draw(1, 256);
    int64_t steps = 0, tiles = 0;
    bool equal = true;
    std::set<int> columns;  // the numbers of tiles that there are
    int column_places = 0;
    for (int b = 0; b < p.batch; ++b) {
      const Request r = request_of(p, b);
      steps += static_cast<int64_t>(r.tiles) * r.steps;
      tiles += r.tiles;
      equal &= r.steps == request_of(p, 0).steps;
      if (r.tiles == 0) continue;
      columns.insert(r.tiles);
      column_places += r.steps + kBeginCost;
    }
    const int even = std::max(kMinRun, static_cast<int>((steps + blocks - 1) / blocks));
    bool cut = false;
    const bool many_rows = draw(0, 3) > 0;
    if (!Check(p, Choose(p, blocks, many_rows), blocks, problem, &cut, &load)) return 1;
    // What a block does, beside an equal share of all steps and of what each tile takes to begin: the worst of 100,000
    // problems was 3.1 times that, of many short tiles.
    const double share = static_cast<double>(steps + kBeginCost * tiles) / blocks + kBeginCost + kCutCost;
    if (many_rows && load > 4 * share) {
      std::printf("problem %d, %d blocks: %d instead of %.0f steps\n", problem, blocks, load, share);
      return 1;
    }
    Plan plan{even, false};
    if (!Check(p, plan, blocks, problem, &cut, &load)) return 1;
    cuts += cut;
    // Every number of whole tiles for each block, balanced or not.
    for (plan.tiles = 1; plan.tiles * static_cast<int64_t>(blocks) <= tiles; plan.tiles += 1 + plan.tiles / 4) {
      std::tie(plan.request, plan.tile) = FindTile(p, plan.tiles * blocks);
      int64_t rest = 0;
      for (int b = 0; b < p.batch; ++b) {
        const Request r = rest_of(p, plan, b);
        rest += static_cast<int64_t>(r.tiles) * r.steps;
      }
      plan.run = std::max(kMinRun, static_cast<int>((rest + blocks - 1) / blocks));
      if (!Check(p, plan, blocks, problem, &cut, &load)) return 1;
      mixed += cut;
      // The rest as whole items, with the first length that suffices.
      for (Plan rounds{plan.run, true, plan.tiles, plan.request, plan.tile}; rounds.run < rest + 3; ++rounds.run) {
        int64_t needed = 0;
        for (int b = 0; b < p.batch; ++b) needed += blocks_of(rounds, rest_of(p, rounds, b));
        if (needed > blocks) continue;
        if (!Check(p, rounds, blocks, problem, &cut, &load)) return 1;
        ++mixed_whole;
        break;
      }
      // Where all tiles are of one length, no block has more to do than in an even cut.
      if (equal && rest > blocks && plan.tiles * request_of(p, 0).steps + plan.run > even) {
        std::printf("problem %d, %d blocks: %d tiles, %d steps, not %d\n", problem, blocks, plan.tiles, plan.run, even);
        return 1;
      }
    }
    if (columns.size() == 1 && *columns.begin() <= blocks) {
      const int runs = blocks / *columns.begin();
      plan = {std::max(kMinRun, (column_places + runs - 1) / runs), false, 0, 0, 0, *columns.begin()};
      if (!Check(p, plan, blocks, problem, &cut, &load)) return 1;
      columns_cut += cut && plan.columns > 1;
    }
    plan = {even, true};
    // Every length of whole items that suffices.
    for (; plan.run < steps + 3; plan.run += 1 + plan.run / 16) {
      int64_t needed = 0;
      for (int b = 0; b < p.batch; ++b) needed += blocks_of(plan, request_of(p, b));
      if (needed > blocks) continue;
      if (!Check(p, plan, blocks, problem, &cut, &load)) return 1;
      ++plans;
      break;
    }
  }
  std::printf("%d cut plans, %d after whole tiles, %d whole items after those, %d columns, %d of whole items\n", cuts,
              mixed, mixed_whole, columns_cut, plans);
  return cuts > 0 && mixed > 0 && mixed_whole > 0 && columns_cut > 0 && plans > 0 ? 0 : 1;
}
