// The plan of verify_attn's work as the kernels make it, by all threads of all blocks on emulated warps: the one that
// the oracle chooses, all work once, and a list of exactly the tiles that were cut, with the splits that blocks leave.
#include "tests/ffi/warps.h"

#include <map>
#include <random>
#include <set>

#include "tests/ffi/plan_oracle.h"

using namespace ddtree;

namespace {

using Tile = std::pair<int, int>;  // of a request

#define EXPECT(...)                                                                                                 \
  if (!(__VA_ARGS__)) {                                                                                             \
    std::printf("problem %d, %s: %s\n", problem, name.c_str(), #__VA_ARGS__);                                       \
    return false;                                                                                                   \
  }

bool Check(Problem p, int blocks, bool many_rows, int problem, const std::string& name) {
  const Plan wanted = Choose(p, blocks, many_rows);
  int64_t all_tiles = 0;
  for (int b = 0; b < p.batch; ++b) all_tiles += (p.nodes * p.heads + kTileRows - 1) / kTileRows;
  std::vector<SplitTile> memory(blocks + all_tiles + 1);  // the first is the list's head
  std::fill_n(reinterpret_cast<char*>(memory.data()), memory.size() * sizeof(SplitTile), 0x7e);
  p.split_tiles = reinterpret_cast<SplitTiles*>(memory.data());
  std::map<Tile, std::vector<int>> done;   // how often each step
  std::map<Tile, std::set<int>> left;      // a tile's splits
  gridDim.x = blocks;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    int needed[kTries];
    Run run{};
    warps::RunBlock(256, [&] {
      many_rows ? start_run<true>(p, needed, &run) : start_run<false>(p, needed, &run);
      __syncthreads();
      if (const int warp = threadIdx.x / 32; warp >= 4) list_split_tiles(p, run, warp - 4, 4, threadIdx.x % 32);
    });
    const Plan& plan = run.plan;
    EXPECT(plan.run == wanted.run && plan.whole == wanted.whole && plan.tiles == wanted.tiles &&
           plan.columns == wanted.columns);
    for (Segment s;;) {
      next_segment(p, &run, &s);
      if (s.request == p.batch) break;
      const Request r = request_of(p, s.request);
      EXPECT(s.tile >= 0 && s.tile < r.tiles && s.step >= 0 && s.step < s.end_step && s.end_step <= r.steps);
      std::vector<int>& steps = done[{s.request, s.tile}];
      steps.resize(r.steps);
      for (int step = s.step; step < s.end_step; ++step) ++steps[step];
      if (s.step == 0 && s.end_step == r.steps) continue;
      EXPECT(left[{s.request, s.tile}].insert(block * kBlockSplits + s.split).second);
    }
  }
  for (int b = 0; b < p.batch; ++b) {
    const Request r = request_of(p, b);
    for (int t = 0; t < r.tiles; ++t) EXPECT(done[{b, t}] == std::vector<int>(r.steps, 1));
  }
  const SplitTiles& list = *p.split_tiles;
  EXPECT(list.count >= 0 && list.count <= blocks + all_tiles);
  std::set<Tile> listed;
  for (int i = 0; i < list.count; ++i) {
    const SplitTile& tile = list.tiles[i];
    if (tile.rows == 0) continue;
    const Tile key{tile.request, tile.first_row / kTileRows};
    EXPECT(tile.first_row % kTileRows == 0 && left.count(key) && listed.insert(key).second);
    EXPECT(tile.rows == std::min(request_of(p, tile.request).nodes * p.heads - tile.first_row, kTileRows));
    EXPECT(tile.splits.count() <= list.most_splits);
    std::set<int> splits;
    for (int k = 0; k < tile.splits.count(); ++k) {
      if (const int split = tile.splits.get(k); split >= 0) EXPECT(splits.insert(split).second);
    }
    EXPECT(splits == left[key]);
  }
  EXPECT(listed.size() == left.size() && static_cast<int>(listed.size()) <= list.count);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937 generator(static_cast<unsigned>(std::atoi(argv[1])));
  const auto draw = [&](int low, int high) { return low + static_cast<int>(generator() % (high - low + 1)); };
  std::map<std::string, int> names;
  for (int problem = 0; problem < std::atoi(argv[2]); ++problem) {
    Problem p{};
    const bool uniform = draw(0, 2) == 0, same_nodes = draw(0, 1);
    p.batch = draw(1, draw(0, 2) ? 12 : 70), p.nodes = draw(0, 2) ? draw(1, 70) : draw(0, 1) ? 1 : 17;
    p.heads = 1 << draw(0, 6), p.rows = p.nodes + draw(0, draw(0, 1) ? 400 : 9000), p.step_rows = draw(0, 2) ? 64 : 32;
    std::vector<int32_t> lengths(p.batch), nodes(p.batch);
    const int few_long = draw(0, 2) == 0;
    for (int b = 0; b < p.batch; ++b) {
      lengths[b] = few_long ? draw(0, 3) ? draw(0, p.rows / 16) : p.rows : draw(-2, p.rows + 2);
      if (uniform) lengths[b] = p.rows;
      nodes[b] = uniform || same_nodes || draw(0, 3) ? p.nodes : draw(0, p.nodes);
    }
    p.lengths = lengths.data(), p.num_nodes = nodes.data();
    const int blocks = draw(0, 2) ? 132 : draw(1, 256);
    const bool many_rows = p.step_rows == 32 || p.nodes * p.heads > 32;
    const std::string name = Name(Choose(p, blocks, many_rows));
    ++names[name];
    if (!Check(p, blocks, many_rows, problem, name)) return 1;
  }
  for (const auto& [name, count] : names) std::printf("%d of %s\n", count, name.c_str());
  return names.size() >= 3 ? 0 : 1;
}
