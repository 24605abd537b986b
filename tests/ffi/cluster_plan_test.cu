// Whether the blocks of clusters do all steps of all tiles once, and which problems get clusters: on the host.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "ffi/cuda/verify_attn/cluster.h"

using namespace ddtree;

#define EXPECT(condition)                                              \
  if (!(condition)) {                                                  \
    std::printf("problem %d, size %d: %s\n", problem, size, #condition); \
    return false;                                                      \
  }

namespace {

bool CheckSteps(const Problem& p, int size, bool leads, int problem) {
  std::map<std::pair<int, int>, std::vector<int>> done;  // of a tile: how often each step
  const int blocks = p.batch * shape_tiles(p.nodes, p.heads) * size;
  for (int block = 0; block < blocks; ++block) {
    const ClusterSegment s = cluster_segment(p, block, size, leads);
    EXPECT(s.request >= 0 && s.request < p.batch && s.tile >= 0 && s.tile < shape_tiles(p.nodes, p.heads));
    const Request r = request_of(p, s.request);
    EXPECT(s.length == r.length && s.nodes == r.nodes && s.steps == (s.tile < r.tiles ? r.steps : 0));
    const int rank = block % size, count = step_count(s), sharers = sharers_of(s.steps, size);
    EXPECT(rank < sharers ? count == s.steps / sharers || count == s.steps / sharers + 1 : count == 0);
    EXPECT(count == 0 || !leads || step_at(s, 0) == rank);
    std::vector<int>& steps = done[{s.request, s.tile}];
    steps.resize(s.steps);
    for (int i = 0; i < count; ++i) {
      EXPECT(step_at(s, i) >= 0 && step_at(s, i) < s.steps && (i == 0 || step_at(s, i) > step_at(s, i - 1)));
      ++steps[step_at(s, i)];
    }
  }
  for (const auto& tile : done) EXPECT(tile.second == std::vector<int>(tile.second.size(), 1));
  return true;
}

// Clusters of c blocks in eight groups of SMs, two of them with 18 and six with 16.
bool CheckSizes(int problem) {
  int size = 0, fits[kMostCluster + 1] = {};
  for (int c = 1; c <= kMostCluster; ++c) fits[c] = 16 / c * 6 + 18 / c * 2;
  const auto chosen = [&](int64_t batch, int64_t tiles, int64_t steps) {
    return size = cluster_size(batch, tiles, steps, 132, fits);
  };
  for (int64_t batch = 1; batch < 40; ++batch) {
    for (int64_t tiles = 1; tiles < 40; ++tiles) {
      for (int64_t steps = 1; steps < 5000; steps += 1 + steps / 9) {
        chosen(batch, tiles, steps);
        EXPECT(size >= 0 && size <= kMostCluster && size <= steps);
        EXPECT(size == 0 || fits[size] >= batch * tiles);
      }
    }
  }
  EXPECT(chosen(1, 5, 33) == 16);
  EXPECT(chosen(1, 5, 7) == 7);
  EXPECT(chosen(1, 8, 2048) == 16);
  EXPECT(chosen(8, 1, 33) == 16);
  EXPECT(chosen(8, 1, 513) == 0);   // one long request of eight would have but one cluster
  EXPECT(chosen(1, 1, 2048) == 0);  // one tile's steps must be shared by all SMs
  EXPECT(chosen(1, 133, 7) == 0);   // a tile too many
  const int none[kMostCluster + 1] = {};
  EXPECT((size = cluster_size(1, 1, 33, 132, none)) == 0);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937 generator(static_cast<unsigned>(std::atoi(argv[1])));
  const auto draw = [&](int low, int high) { return low + static_cast<int>(generator() % (high - low + 1)); };
  for (int problem = 0; problem < std::atoi(argv[2]); ++problem) {
    Problem p{};
    p.batch = draw(1, 9), p.nodes = draw(0, 2) ? draw(1, 70) : 1, p.heads = draw(1, 64);
    p.rows = p.nodes + draw(0, draw(0, 1) ? 300 : 131072), p.step_rows = kHopperStep;
    std::vector<int32_t> lengths(p.batch), nodes(p.batch);
    for (int b = 0; b < p.batch; ++b) {
      lengths[b] = draw(-2, p.rows + 2);
      nodes[b] = draw(0, 3) ? p.nodes : draw(0, p.nodes);
    }
    p.lengths = lengths.data(), p.num_nodes = nodes.data();
    if (!CheckSteps(p, draw(1, kMostCluster), draw(0, 1), problem)) return 1;
  }
  return CheckSizes(-1) ? 0 : 1;
}
