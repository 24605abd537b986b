// The best-first tree of up to 32 nodes, one block per request: one warp runs the heap, all warps load, link and write.
//
// The frontier of the heap holds at most one node for every node already popped: the best child not yet popped. So it
// is an array indexed by the parent, kept in registers, one parent a lane, and a pop is an arg-max over the warp. What
// follows a frontier node in its lane is worked out when the node enters, and what a node would open before it is known
// whether that is the one, so that a pop waits for neither memory nor arithmetic.
//
// Keys are float64 sums from the root down, compared as integers in the same order. Equal keys are common with bfloat16
// logits; the lexicographically smaller rank path then goes first, a prefix before what it begins. That is the order in
// which a walk in depth first order, children by rank, meets the nodes, and the next child of a parent comes right
// after all that is below the parent by now. So each lane keeps its parent's place in that walk and where its subtree
// ends: among parents whose next children tie the one whose subtree ends first wins, and of two that end together the
// inner one. A new node moves the places behind it by one. Every case of the definition falls out: -inf keys, equal
// rows, sums that round.
#ifndef DDTREE_FFI_CUDA_TREE_HEAP_H_
#define DDTREE_FFI_CUDA_TREE_HEAP_H_

#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/ddtree.h"

namespace ddtree::heap {

constexpr int kThreads = 256;
constexpr int kMaxBudget = 32;

// A node in the lattice: its rank, its depth and its left sibling.
struct Info {
  uint32_t bits;
  __device__ __forceinline__ Info(int rank, int depth) : bits(rank | depth << 9) {}
  __device__ __forceinline__ explicit Info(uint32_t packed) : bits(packed) {}
  __device__ __forceinline__ int rank() const { return bits & 511; }
  __device__ __forceinline__ int depth() const { return bits >> 9 & 31; }
  __device__ __forceinline__ int left() const { return bits >> 14; }
  __device__ __forceinline__ Info next(int left) const { return Info((bits & ((1u << 14) - 1)) + 1 | left << 14); }
};

// Where a node of the tree begins and where its subtree ends in the walk, in 18 bits: the lower one's next child comes
// first.
struct Place {
  uint32_t bits;
  __device__ __forceinline__ Place(int begin, int end) : bits(end << 9 | (511 - begin)) {}
  __device__ __forceinline__ explicit Place(uint32_t packed) : bits(packed) {}
  __device__ __forceinline__ int end() const { return bits >> 9; }
  // After `parent` got another last child, which stands at `parent.end()`. The ends of that place or later of the
  // parent, of nodes around it and of nodes behind it move, not those of nodes inside it.
  __device__ __forceinline__ Place moved(Place parent) const {
    const bool begins_later = (bits & 511) <= 511u - parent.end(), ends_later = bits >= parent.bits;
    return Place(bits + (ends_later ? 512u : 0u) - (begins_later ? 1u : 0u));
  }
};
constexpr uint32_t kNoPlace = 511;  // begins and ends before all others: never moves

struct Shared {
  double log_probs[DDTREE_MAX_DEPTH * kMaxBudget];  // [L, columns]
  double weight[kMaxBudget + 1];
  uint32_t info[kMaxBudget + 1];
  int16_t parent[kMaxBudget + 1], next_token[kMaxBudget + 1], next_sibling[kMaxBudget + 1];
  int num_nodes;
};

// Unsigned integers in the order of the numbers; never 0, which marks an empty slot.
__device__ __forceinline__ uint64_t order(double x) {
  const uint64_t bits = __double_as_longlong(x);
  return bits ^ (static_cast<uint64_t>(static_cast<int64_t>(bits) >> 63) | 1ull << 63);
}

__device__ __forceinline__ double number(uint64_t code) {
  return __longlong_as_double(code >> 63 ? code ^ 1ull << 63 : ~code);
}

// Both values are there: a branch would cost more than what it spares.
#define DDTREE_SELECT(type, suffix, letter)                                                             \
  __device__ __forceinline__ type select(bool first, type a, type b) {                                  \
    type result;                                                                                        \
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp." suffix " %0, %1, %2, p;\n}"                   \
        : "=" letter(result)                                                                            \
        : letter(a), letter(b), "r"(uint32_t{first}));                                                  \
    return result;                                                                                      \
  }
DDTREE_SELECT(uint64_t, "b64", "l")
DDTREE_SELECT(uint32_t, "b32", "r")
DDTREE_SELECT(double, "f64", "d")
#undef DDTREE_SELECT

// Pops up to `limit` nodes and returns the node count, root included; `limit` <= kMaxBudget. With `reserve`, places are
// kept for the rest of the spine, the nodes of rank 0 only.
__device__ __forceinline__ int run(Shared& shared, int depth, int columns, int limit, bool reserve) {
  if (limit == 0) return 1;
  const int lane = threadIdx.x;
  const double* log_probs = shared.log_probs;
  // The key of the lane's frontier node (0 for none) and of the node that follows it there, which node it is, the
  // log-probability of its first child, and of its parent the weight and the place.
  uint64_t key = 0, following = 0;
  uint32_t info = Info(0, 1).bits, place = kNoPlace;
  double to_child = 0, weight = 0;
  if (lane == 0) key = order(0.0 + log_probs[0]), place = Place(0, 1).bits;
  // What the last pop changed, finished a round later, while the warp waits for the arg-max: lane `parent` moved on to
  // a node that another follows if `more`, and lane n - 1 opened.
  int parent = -1;
  bool more = false, more_children = columns > 1;
  double to_following = 0, to_second = log_probs[min(1, columns - 1)], to_first = log_probs[depth > 1 ? columns : 0];
  int free = reserve ? limit - depth : limit;  // nodes off the spine that may still enter
  int tip = 0, tip_depth = 0;
  int n = 1;
  for (; n <= limit; ++n) {
    const uint32_t high = static_cast<uint32_t>(key >> 32);
    const uint32_t top = __reduce_max_sync(~0u, high);
    const bool moved = lane == parent, opened = lane == n - 1;
    const double sum = weight + (opened ? to_second : to_following);
    const uint64_t next = select(opened ? more_children : more, order(sum), uint64_t{0});
    following = select(moved || opened, next, following);
    to_child = opened ? to_first : to_child;
    const double mine = number(key);
    const uint64_t my_child = select(Info(info).depth() < depth, order(mine + to_child), uint64_t{0});
    uint32_t tied = __ballot_sync(~0u, high == top);
    if (top == 0) break;  // the lattice is exhausted
    if (tied & (tied - 1)) {
      const bool high_ties = high == top;
      const uint32_t low = high_ties ? static_cast<uint32_t>(key) : 0u;
      const uint32_t most = __reduce_max_sync(~0u, low);
      const bool ties = high_ties && low == most;
      tied = __ballot_sync(~0u, ties);
      if (tied & (tied - 1)) {
        const uint32_t mine_first = ties ? place : ~0u;
        const uint32_t first = __reduce_min_sync(~0u, mine_first);
        tied = __ballot_sync(~0u, mine_first == first);
      }
    }
    parent = __ffs(tied) - 1;
    const Info node(__shfl_sync(~0u, info, parent));
    const Place around(__shfl_sync(~0u, place, parent));
    const uint64_t child = __shfl_sync(~0u, my_child, parent);
    const double node_weight = __shfl_sync(~0u, mine, parent);
    const bool on_spine = node.rank() == 0 && parent == tip;
    free -= !on_spine;
    if (free < 0) break;
    tip = on_spine ? n : tip, tip_depth = on_spine ? node.depth() : tip_depth;
    if (lane == 0) shared.weight[n] = node_weight, shared.info[n] = node.bits, shared.parent[n] = parent;
    // The parent's lane moves on to the sibling, and lane n opens with the child.
    const int child_depth = min(node.depth() + 1, depth), after = node.rank() + 2;
    more = after < columns, more_children = child != 0 && columns > 1;
    to_following = log_probs[(node.depth() - 1) * columns + min(after, columns - 1)];
    to_second = log_probs[(child_depth - 1) * columns + min(1, columns - 1)];
    to_first = log_probs[(min(child_depth + 1, depth) - 1) * columns];
    const bool moves = lane == parent, opens = lane == n;
    key = select(moves, following, select(opens, child, key));
    info = select(moves, node.next(n).bits, select(opens, Info(0, child_depth).bits, info));
    weight = opens ? node_weight : weight;
    place = select(opens, Place(around.end(), around.end() + 1).bits, Place(place).moved(around).bits);
  }
  __syncwarp();
  if (reserve) {
    for (double sum = shared.weight[tip]; tip_depth < depth && n <= limit; ++n) {
      sum += log_probs[tip_depth++ * columns];
      if (lane == 0) {
        shared.weight[n] = sum, shared.info[n] = Info(0, tip_depth).bits;
        shared.parent[n] = tip;
      }
      tip = n;
    }
  }
  return n;
}

static __global__ void __launch_bounds__(kThreads) build_trees(ddtree_tree_build_args args) {
  __shared__ Shared shared;
  const int64_t request = blockIdx.x;
  const int depth = static_cast<int>(args.depth), k = static_cast<int>(args.k), budget = static_cast<int>(args.budget);
  const int nodes = budget + 1;
  const int columns = min(k, max(budget, 1));  // a rank of `budget` or more cannot enter
  const float* log_probs = args.log_probs + request * depth * k;
  const int limit = depth > 0 && k > 0 ? min(max(args.budgets[request], 0), budget) : 0;
  const int32_t root_token = args.root_tokens[request];
#pragma unroll 4
  for (int i = threadIdx.x; i < depth * columns; i += kThreads) {
    shared.log_probs[i] = log_probs[columns == k ? i : i / columns * k + i % columns];
  }
  for (int i = threadIdx.x; i < nodes; i += kThreads) shared.next_token[i] = shared.next_sibling[i] = -1;
  if (threadIdx.x == 0) {
    shared.weight[0] = 0.0, shared.info[0] = 0;
    shared.parent[0] = -1;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int count = run(shared, depth, columns, limit, args.keep_spine != 0 && limit >= depth);
    if (threadIdx.x == 0) shared.num_nodes = count;
  }
  __syncthreads();
  const int num_nodes = shared.num_nodes;
  for (int i = 1 + threadIdx.x; i < num_nodes; i += kThreads) {
    const Info info(shared.info[i]);
    if (info.rank() == 0) {
      shared.next_token[shared.parent[i]] = i;
    } else {
      shared.next_sibling[info.left()] = i;
    }
  }
  const int words = (nodes + 31) / 32;
  for (int i = threadIdx.x; i < nodes * words; i += kThreads) {
    const int node = i / words, word = i % words;
    uint32_t bits = node / 32 == word ? 1u << node % 32 : 0;
    if (node < num_nodes) {
      // Parents come before their children: below the word's first node nothing more can be in it.
      for (int j = shared.parent[node]; j >= 32 * word; j = shared.parent[j]) {
        if (j / 32 == word) bits |= 1u << j % 32;
      }
    }
    args.ancestors[request * nodes * words + i] = bits;
  }
  __syncthreads();
  const int32_t* token_ids = args.token_ids + request * depth * k;
  for (int i = threadIdx.x; i < nodes; i += kThreads) {
    const int64_t at = request * nodes + i;
    const bool used = i < num_nodes;
    const Info info(used ? shared.info[i] : 0u);
    args.tokens[at] = !used ? 0 : i == 0 ? root_token : token_ids[(info.depth() - 1) * k + info.rank()];
    args.parents[at] = used ? shared.parent[i] : -1;
    args.depths[at] = info.depth();
    args.next_token[at] = shared.next_token[i];
    args.next_sibling[at] = shared.next_sibling[i];
    args.out_log_probs[at] = used ? static_cast<float>(shared.weight[i]) : -INFINITY;
  }
  if (threadIdx.x == 0) args.num_nodes[request] = num_nodes;
}

}  // namespace ddtree::heap

#endif  // DDTREE_FFI_CUDA_TREE_HEAP_H_
