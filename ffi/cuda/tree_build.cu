// The best-first tree, one block a request: one warp runs the heap, all warps load, link and write.
//
// The frontier of the heap holds at most one node for every node already popped: the best child not yet popped. So it
// is an array indexed by the parent, kept in registers (slot s of lane l is parent 32 s + l), and a pop is an arg-max
// over the warp. Every lane works out what would follow its own best node before it knows whether that is the one, so
// that a pop waits for neither memory nor arithmetic on keys.
//
// Keys are float64 sums from the root down, compared as integers in the same order. Equal keys are common with bfloat16
// logits; the rank path decides them, packed into 64 bits by a prefix code that keeps lexicographic order: rank 0 is
// "0"; rank r >= 1 is floor(log2 r) + 1 ones, a zero, then r's bits below the leading one. A node of rank path
// (r1, r2, ...) comes after prod(r + 1) - 1 others, so 31 ranks take less than 64 bits. No frontier node is a prefix of
// another, so padding with zeros is harmless. Every case of the definition falls out: -inf keys, equal rows, sums that
// round.
#include <cuda_runtime.h>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/ddtree.h"

namespace {

constexpr int kThreads = 256;

// A node's place in the lattice, in 32 bits: rank, depth, length of its parent's code, slot of its parent in the lane
// that holds it, and its left sibling.
struct Info {
  uint32_t bits;
  __device__ __forceinline__ Info(int rank, int depth, int length, int slot)
      : bits(rank | depth << 9 | (length & 63) << 14 | slot << 20) {}
  __device__ __forceinline__ explicit Info(uint32_t packed) : bits(packed) {}
  __device__ __forceinline__ int rank() const { return bits & 511; }
  __device__ __forceinline__ int depth() const { return bits >> 9 & 31; }
  __device__ __forceinline__ int length() const { return bits >> 14 & 63; }
  __device__ __forceinline__ int slot() const { return bits >> 20 & 7; }
  __device__ __forceinline__ int left() const { return bits >> 23; }
  __device__ __forceinline__ Info next(int left) const { return Info((bits & ((1u << 23) - 1)) + 1 | left << 23); }
};

struct Shared {
  float log_probs[DDTREE_MAX_DEPTH * DDTREE_MAX_CANDIDATES];  // [L, columns]
  double weight[DDTREE_MAX_NODES];
  uint64_t code[DDTREE_MAX_NODES];
  uint32_t info[DDTREE_MAX_NODES];
  int16_t parent[DDTREE_MAX_NODES], next_token[DDTREE_MAX_NODES], next_sibling[DDTREE_MAX_NODES];
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

__device__ __forceinline__ int code_bits(int rank) { return rank == 0 ? 1 : 2 * (32 - __clz(rank)); }

__device__ __forceinline__ uint64_t append_code(uint64_t code, int length, int rank) {
  const int low_bits = 31 - __clz(rank);
  const uint32_t word = ((2u << low_bits) - 1) << (low_bits + 1) | (rank - (1 << low_bits));
  return code | static_cast<uint64_t>(word) << (62 - 2 * low_bits - length);
}

// A frontier entry: the key above the inverted code, so that the first to be popped is the largest.
using Entry = unsigned __int128;

__device__ __forceinline__ Entry entry(uint64_t key, uint64_t code) { return static_cast<Entry>(key) << 64 | ~code; }
__device__ __forceinline__ uint64_t key_of(Entry e) { return static_cast<uint64_t>(e >> 64); }
__device__ __forceinline__ uint64_t code_of(Entry e) { return ~static_cast<uint64_t>(e); }

// Pops up to `limit` nodes and returns the node count, root included; `limit` <= 32 * kSlots. With `reserve`, places
// are kept for the rest of the spine, the nodes of rank 0 only.
template <int kSlots>
__device__ int run_heap(Shared& shared, int depth, int columns, int limit, bool reserve) {
  const int lane = threadIdx.x;
  const auto log_prob = [&](int d, int rank) -> float { return shared.log_probs[(d - 1) * columns + rank]; };
  Entry frontier[kSlots];
  uint32_t info[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) frontier[s] = 0, info[s] = Info(0, 1, 0, s).bits;
  if (limit > 0 && lane == 0) frontier[0] = entry(order(0.0 + static_cast<double>(log_prob(1, 0))), 0);
  int free = limit - depth;  // nodes off the spine that may still enter, when reserving
  int tip = 0, tip_depth = 0;
  int n = 1;
  for (; n <= limit; ++n) {
    Entry best = frontier[0];
    uint32_t best_info = info[0];
#pragma unroll
    for (int s = 1; s < kSlots; ++s) {
      const bool better = frontier[s] > best;
      best = better ? frontier[s] : best;
      best_info = better ? info[s] : best_info;
    }
    // What follows this lane's best, in case it is popped: its next sibling and its first child.
    const Info mine(best_info);
    const int my_parent = min(mine.slot() * 32 + lane, n - 1), sibling = mine.rank() + 1, d = mine.depth();
    const double parent_weight = shared.weight[my_parent];
    const uint64_t parent_code = shared.code[my_parent];
    const float to_sibling = log_prob(d, min(sibling, columns - 1)), to_child = log_prob(min(d + 1, depth), 0);
    const uint32_t high = static_cast<uint32_t>(best >> 96);
    const uint32_t top = __reduce_max_sync(~0u, high);
    uint32_t tied = __ballot_sync(~0u, high == top);
    const double weight = number(key_of(best));
    const uint64_t sibling_key = sibling < columns ? order(parent_weight + static_cast<double>(to_sibling)) : 0;
    const uint64_t child_key = d < depth ? order(weight + static_cast<double>(to_child)) : 0;
    const uint64_t sibling_code = append_code(parent_code, mine.length(), sibling);
    if (top == 0) break;  // the lattice is exhausted
    if (tied & (tied - 1)) {
      bool in = high == top;
#pragma unroll
      for (int word = 2; word >= 0; --word) {
        const uint32_t part = in ? static_cast<uint32_t>(best >> (32 * word)) : 0u;
        const uint32_t most = __reduce_max_sync(~0u, part);
        in = in && part == most;
        if (word == 2) {
          tied = __ballot_sync(~0u, in);
          if (!(tied & (tied - 1))) break;
        }
      }
      tied = __ballot_sync(~0u, in);
    }
    const int owner = __ffs(tied) - 1;
    const Info node(__shfl_sync(~0u, best_info, owner));
    const uint64_t node_code = __shfl_sync(~0u, code_of(best), owner);
    const uint64_t first_key = __shfl_sync(~0u, child_key, owner);
    const int parent = node.slot() * 32 + owner;
    if (node.rank() == 0 && parent == tip) {
      tip = n, tip_depth = node.depth();
    } else if (reserve && free-- == 0) {
      break;
    }
    if (lane == owner) {
      shared.weight[n] = weight, shared.code[n] = node_code, shared.info[n] = best_info;
      shared.parent[n] = parent;
    }
    // The parent's slot moves on to the sibling, and slot n opens with the child.
    const int child_depth = min(node.depth() + 1, depth), child_length = node.length() + code_bits(node.rank());
    const Entry next_sibling = entry(sibling_key, sibling_code), first_child = entry(first_key, node_code);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const bool moves = s * 32 + lane == parent, opens = s * 32 + lane == n;
      frontier[s] = moves ? next_sibling : opens ? first_child : frontier[s];
      info[s] = moves ? mine.next(n).bits : opens ? Info(0, child_depth, child_length, s).bits : info[s];
    }
    __syncwarp();
  }
  if (reserve) {
    for (double weight = shared.weight[tip]; tip_depth < depth && n <= limit; ++n) {
      weight += static_cast<double>(log_prob(++tip_depth, 0));
      if (lane == 0) {
        shared.weight[n] = weight, shared.info[n] = Info(0, tip_depth, 0, 0).bits;
        shared.parent[n] = tip;
      }
      tip = n;
    }
  }
  return n;
}

template <int kSlots>
__global__ void __launch_bounds__(kThreads) build_trees(ddtree_tree_build_args args) {
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
    shared.weight[0] = 0.0, shared.code[0] = 0, shared.info[0] = 0;
    shared.parent[0] = -1;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int count = run_heap<kSlots>(shared, depth, columns, limit, args.keep_spine != 0 && limit >= depth);
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

}  // namespace

size_t ddtree_tree_build_workspace(int64_t, int64_t, int64_t, int64_t) { return 0; }

int ddtree_tree_build_cuda(const ddtree_tree_build_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  if (args->batch > INT32_MAX) return DDTREE_INVALID_ARGUMENT;
  if (args->batch == 0) return DDTREE_OK;
  const auto kernel = args->budget <= 32    ? build_trees<1>
                      : args->budget <= 64  ? build_trees<2>
                      : args->budget <= 128 ? build_trees<4>
                                            : build_trees<8>;
  kernel<<<static_cast<unsigned>(args->batch), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return ddtree::launch_status();
}
