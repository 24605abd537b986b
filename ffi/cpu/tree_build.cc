// The best-first draft tree (DDTree, arXiv 2604.12989, algorithm 1): a heap over prefixes of the rank lattice.
#include <algorithm>
#include <cmath>

#include "ffi/arguments.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/ddtree.h"

namespace {

// A prefix that may become a node: rank `rank` at depth `depth` under node `parent`.
struct Candidate {
  double mass;  // sum of log-probs from the root down
  int32_t parent, depth, rank;
};

// The nodes chosen so far, root at 0.
struct Chosen {
  int32_t parent[DDTREE_MAX_NODES], depth[DDTREE_MAX_NODES], rank[DDTREE_MAX_NODES];
  bool spine[DDTREE_MAX_NODES];
};

// Whether a's rank path comes before b's: lexicographic, a prefix first. Paths are read off the parents.
bool PathBefore(const Chosen& nodes, const Candidate& a, const Candidate& b) {
  int32_t x = a.parent, y = b.parent, x_rank = a.rank, y_rank = b.rank, dx = a.depth, dy = b.depth;
  while (dx > dy) x_rank = nodes.rank[x], x = nodes.parent[x], --dx;
  while (dy > dx) y_rank = nodes.rank[y], y = nodes.parent[y], --dy;
  // The ranks below the deepest shared ancestor decide; equal there means that one is a prefix of the other.
  while (x != y) {
    x_rank = nodes.rank[x], x = nodes.parent[x];
    y_rank = nodes.rank[y], y = nodes.parent[y];
  }
  if (x_rank != y_rank) return x_rank < y_rank;
  return a.depth < b.depth;
}

}  // namespace

int ddtree_tree_build_cpu(const ddtree_tree_build_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  const int64_t n_max = a->budget + 1, words = (n_max + 31) / 32, depth = a->depth, k = a->k;
  Chosen nodes;
  Candidate heap[2 * DDTREE_MAX_NODES];
  double mass[DDTREE_MAX_NODES];
  int32_t last_child[DDTREE_MAX_NODES];
  for (int64_t b = task; b < a->batch; b += tasks) {
    const float* log_probs = a->log_probs + b * depth * k;
    const int32_t* ids = a->token_ids + b * depth * k;
    const int64_t budget = std::clamp<int64_t>(a->budgets[b], 0, a->budget);
    int64_t spine_left = a->keep_spine && k > 0 && budget >= depth ? depth : 0;

    auto after = [&](const Candidate& x, const Candidate& y) {
      if (x.mass != y.mass) return x.mass < y.mass;
      return PathBefore(nodes, y, x);
    };
    int64_t size = 0, n = 1;
    auto push = [&](int32_t parent, int32_t d, int32_t rank) {
      heap[size++] = {mass[parent] + static_cast<double>(log_probs[(d - 1) * k + rank]), parent, d, rank};
      std::push_heap(heap, heap + size, after);
    };
    auto add = [&](int32_t parent, int32_t d, int32_t rank, double m, bool spine) {
      nodes.parent[n] = parent, nodes.depth[n] = d, nodes.rank[n] = rank, nodes.spine[n] = spine, mass[n] = m;
      ++n;
    };
    int32_t tip = 0;  // the deepest spine node so far
    n = 0;
    add(-1, 0, -1, 0, true);
    if (depth > 0 && k > 0 && budget > 0) push(0, 1, 0);
    while (size > 0 && n <= budget) {
      std::pop_heap(heap, heap + size, after);
      const Candidate top = heap[--size];
      const bool spine = nodes.spine[top.parent] && top.rank == 0;
      if (top.rank + 1 < k) push(top.parent, top.depth, top.rank + 1);
      // When the places that are left are the rest of the spine's, no other node gets in any more.
      if (!spine && n + spine_left > budget) break;
      if (spine && spine_left > 0) --spine_left, tip = static_cast<int32_t>(n);
      add(top.parent, top.depth, top.rank, top.mass, spine);
      if (top.depth < depth) push(static_cast<int32_t>(n - 1), top.depth + 1, 0);
    }
    for (; spine_left > 0; --spine_left) {
      const int32_t d = nodes.depth[tip] + 1;
      add(tip, d, 0, mass[tip] + static_cast<double>(log_probs[(d - 1) * k]), true);
      tip = static_cast<int32_t>(n - 1);
    }

    int32_t* tokens = a->tokens + b * n_max;
    int32_t* parents = a->parents + b * n_max;
    int32_t* depths = a->depths + b * n_max;
    int32_t* child = a->next_token + b * n_max;
    int32_t* sibling = a->next_sibling + b * n_max;
    float* out = a->out_log_probs + b * n_max;
    uint32_t* bits = a->ancestors + b * n_max * words;
    std::fill(bits, bits + n_max * words, 0u);
    for (int64_t i = 0; i < n_max; ++i) {
      child[i] = sibling[i] = last_child[i] = -1;
      bits[i * words + i / 32] |= 1u << (i % 32);
      if (i >= n) {
        tokens[i] = 0, parents[i] = -1, depths[i] = 0, out[i] = -INFINITY;
        continue;
      }
      const int32_t p = parents[i] = nodes.parent[i];
      depths[i] = nodes.depth[i];
      out[i] = static_cast<float>(mass[i]);
      tokens[i] = p < 0 ? a->root_tokens[b] : ids[(nodes.depth[i] - 1) * k + nodes.rank[i]];
      if (p < 0) continue;
      for (int64_t w = 0; w < words; ++w) bits[i * words + w] |= bits[p * words + w];
      (last_child[p] < 0 ? child[p] : sibling[last_child[p]]) = static_cast<int32_t>(i);
      last_child[p] = static_cast<int32_t>(i);
    }
    a->num_nodes[b] = static_cast<int32_t>(n);
  }
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(tree_build)
DDTREE_NO_CUDA_WORKSPACE(tree_build, int64_t, int64_t, int64_t, int64_t)
