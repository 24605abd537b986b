// The best-first tree, one block per request. Up to 32 nodes a warp runs the heap (tree_heap.h); more are found without
// being popped one by one.
//
// The heap pops the paths of the rank lattice in one total order: cost, the negated float64 sum of log-probabilities
// from the root down, then the path of ranks, lexicographic, a prefix first. Equal costs are common with bfloat16
// logits. However sums round, a node comes after its prefixes and after every path as long whose ranks are nowhere
// greater. So a tree is the first `budget` nodes of that order, and
//   - any `budget` nodes give a bound on the last of them: at first what hangs on the spine, the nodes of rank 0;
//   - what is within the bound is found a generation at a time, all parents at once;
//   - the bound shrinks whenever much more than the tree is within it. One barrier counts what is within a trial, so
//     the bound is searched by halving: costs first and, where they tie, paths;
//   - the places of the few nodes that are left are counted pair by pair.
#include <cuda_runtime.h>

#include <type_traits>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/tree_heap.h"
#include "ffi/ddtree.h"

namespace {

constexpr int kSpine = 32;  // entries 0 .. L are the root and the spine; what else was found comes from here on

// A node's place in the heap's order. Costs are not negative, so that the bits of a float64 order as it does. A path is
// a code of ranks, from the top bit on, and the code's length in the low 6 bits: rank r is the bits of r + 1 after the
// leading one, after as many ones as those are and a zero, so that codes order as ranks do. The product of all r + 1 is
// at most 256: a path of 31 ranks takes 31 + 2 * 8 bits.
struct __align__(16) Place {
  uint64_t cost, path;
  __device__ __forceinline__ uint32_t word(int i) const {
    return static_cast<uint32_t>((i < 2 ? cost : path) >> (i % 2 == 0 ? 32 : 0));
  }
};
__device__ __forceinline__ bool before(Place a, Place b) {
  return a.cost < b.cost || (a.cost == b.cost && a.path < b.path);
}
constexpr Place kNever{~0ull, ~0ull};
constexpr uint32_t kInfinity = 0x7ff00000, kOctave = 1 << 20;  // of a cost's first word; of a cost twice as high

__device__ __forceinline__ uint64_t bits(double cost) { return __double_as_longlong(cost); }
__device__ __forceinline__ double number(uint64_t cost) { return __longlong_as_double(cost); }

__device__ __forceinline__ uint64_t child_path(uint64_t path, int rank) {
  const int used = path & 63, bits = 31 - __clz(rank + 1), length = 2 * bits + 1;
  const uint32_t code = (2u << 2 * bits) - (3u << bits) + rank + 1;
  return path + (static_cast<uint64_t>(code) << (64 - used - length)) + length;
}

// What else is known of a node: the product of its ranks plus one, and how many nodes, itself included, go before it
// whatever the values are.
struct Info {
  uint32_t bits;
  __device__ __forceinline__ Info(int rank, int depth, int product, int ahead)
      : bits(rank | depth << 8 | (product - 1) << 13 | ahead << 21) {}
  __device__ __forceinline__ explicit Info(uint32_t packed) : bits(packed) {}
  __device__ __forceinline__ int rank() const { return bits & 255; }
  __device__ __forceinline__ int depth() const { return bits >> 8 & 31; }
  __device__ __forceinline__ int product() const { return (bits >> 13 & 255) + 1; }
  __device__ __forceinline__ int ahead() const { return bits >> 21; }
};

// Of a budget of `kBudget` at most. Each thread looks after one entry. Where they fit, costs are kept as float64, which
// sums take.
template <int kBudget, int kThreads>
struct Shared {
  static constexpr int kLeft = kBudget + kBudget / 2 + 8;  // at most so many entries off the spine are put in order
  static constexpr int kNodes = kBudget + 1, kWords = (kNodes + 31) / 32;
  Place place[kThreads], left[kLeft];
  std::conditional_t<(kBudget <= 64), double, float> cost[DDTREE_MAX_DEPTH * kBudget];  // a row is kBudget apart
  uint32_t info[kThreads], rank[(kSpine + kLeft + 31) / 32 * 32], children[kNodes * kWords];
  uint16_t parent[kThreads], left_entry[kLeft];
  int16_t node[kThreads];         // of an entry that is in the tree
  float spine[DDTREE_MAX_DEPTH];  // of rows made anew
  uint32_t extremes[3][2];        // of `narrow`
  int found[4], num_left;
};

// atomicAdd in shared memory by one lane, without the code that would gather what other lanes add.
__device__ __forceinline__ int add(int* sum, int x) {
  int before;
  asm volatile("atom.shared.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(sum))), "r"(x)
               : "memory");
  return before;
}

// `count` less one if a goes before b: the borrow of a subtraction of 128 bits.
__device__ __forceinline__ int less_if_before(int count, Place a, Place b) {
  int result;
  asm("{\n.reg .u64 t;\nsub.cc.u64 t, %2, %3;\nsubc.cc.u64 t, %4, %5;\nsubc.s32 %0, %1, 0;\n}"
      : "=r"(result)
      : "r"(count), "l"(a.path), "l"(b.path), "l"(a.cost), "l"(b.cost));
  return result;
}

// Narrows `low` and `high` to the least and the greatest that the block's threads have between them. Three slots of
// `extremes` take turns, the first of them ~0 and 0 at first: one is made ready while another is in use, and the last
// one may still be read.
__device__ __forceinline__ void narrow(uint32_t (&extremes)[3][2], int& rotation, uint32_t& low, uint32_t& high,
                                       bool has_a, uint32_t a, bool has_b, uint32_t b) {
  has_a = has_a && low <= a && a <= high, has_b = has_b && low <= b && b <= high;
  const uint32_t least = __reduce_min_sync(~0u, min(has_a ? a : ~0u, has_b ? b : ~0u));
  const uint32_t most = __reduce_max_sync(~0u, max(has_a ? a : 0, has_b ? b : 0));
  auto &now = extremes[rotation], &later = extremes[rotation == 2 ? 0 : rotation + 1];
  if (threadIdx.x % 32 == 0 && least <= most) atomicMin(&now[0], least), atomicMax(&now[1], most);
  if (threadIdx.x == 0) later[0] = ~0u, later[1] = 0;
  rotation = rotation == 2 ? 0 : rotation + 1;
  __syncthreads();
  if (now[0] <= now[1]) low = now[0], high = now[1];
}

// Shrinks `bound` until at most `enough` of what the block's threads have in `a` and, if `two`, `b` are within it, or
// `most` where costs lie close, but no fewer than `need`. `count` of them are, or fewer, and no cost's first word is
// below `low`. `guess` is what to try first.
__device__ __forceinline__ int tighten(uint32_t (&extremes)[3][2], int& rotation, Place& bound, Place a, Place b,
                                       bool two, int count, int need, int enough, int most, uint32_t low,
                                       uint32_t guess) {
  bool sure = !two;  // that so many as it needs are within the bound
  bool in_a = false, in_b = false, ties_a = true, ties_b = two;  // by the words before
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const uint32_t of_a = a.word(i), of_b = b.word(i), all = bound.word(i);
    uint32_t high = all;
    for (int step = i; low < high; ++step) {
      const bool close = i > 0 || high - low < kOctave / 16;
      if (count <= (close ? most : enough)) break;
      if (sure && (close || step == 8)) {
        narrow(extremes, rotation, low, high, ties_a, of_a, ties_b, of_b);
        if (low == high) break;
      }
      uint32_t trial = low + (high - low) / 2;
      if (step < 8) trial = high == kInfinity ? low + 2 * kOctave : max(trial, high - min(high, kOctave));
      if (step == 0) trial = guess;
      trial = min(max(trial, low), high - 1);
      int within = __syncthreads_count(in_a || (ties_a && of_a <= trial));
      if (two) within += __syncthreads_count(in_b || (ties_b && of_b <= trial));
      sure = sure || within >= need;
      high = within >= need ? trial : high;
      count = within >= need ? within : count;
      low = within >= need ? low : trial + 1;
    }
    if (high < all) {
      const uint64_t word = static_cast<uint64_t>(high) << 32;
      if (i < 2) bound = {i == 0 ? word | ~0u : (bound.cost >> 32 << 32 | high), ~0ull};
      if (i >= 2) bound.path = i == 2 ? word | ~0u : (bound.path >> 32 << 32 | high);
    }
    if (!sure || count <= most || i == 3) break;
    in_a = in_a || (ties_a && of_a < high), ties_a = ties_a && of_a == high;
    in_b = in_b || (ties_b && of_b < high), ties_b = ties_b && of_b == high;
    low = 0;
  }
  return count;
}

// Gives each lane of `pushed` an entry from `size` on, as far as there is room, and counts them in *found.
template <int kBudget, int kThreads>
__device__ __forceinline__ void push(Shared<kBudget, kThreads>& shared, uint32_t pushed, bool mine, int size,
                                     int* found, Place place, Info info, int parent) {
  const int lane = threadIdx.x % 32;
  int entry = 0;
  if (lane == 0) entry = add(found, __popc(pushed));
  entry = size + __shfl_sync(~0u, entry, 0) + __popc(pushed & ((1u << lane) - 1));
  if (!mine || entry >= kThreads) return;
  shared.place[entry] = place, shared.info[entry] = info.bits, shared.parent[entry] = parent;
}

// Extends entries [start, end) by what is within `bound`, from rank `from` on. As many lanes share a parent as it may
// well have children.
template <int kBudget, int kThreads>
__device__ __forceinline__ void extend(Shared<kBudget, kThreads>& shared, int start, int end, int from, int size,
                                       Place bound, int depth, int columns, int limit, int* found) {
  constexpr int kLanes = 8;
  const int lane = threadIdx.x % 32, last = lane | (kLanes - 1);
  for (int first = start + threadIdx.x / 32 * (32 / kLanes); first < end; first += kThreads / kLanes) {
    const int parent = min(first + lane / kLanes, end - 1);
    const Place at = shared.place[parent];
    const Info info(shared.info[parent]);
    bool open = first + lane / kLanes < end && info.depth() < depth && !before(bound, at);
    const auto* row = shared.cost + min(info.depth(), depth - 1) * kBudget;
#pragma unroll 1
    for (int rank = from + lane % kLanes;; rank += kLanes) {
      const int product = info.product() * (rank + 1), ahead = info.ahead() + product;
      const double sum = number(at.cost) + static_cast<double>(row[min(rank, columns - 1)]);
      const Place child{bits(sum), child_path(at.path, min(rank, 255))};
      open = open && rank < columns && ahead <= limit && !before(bound, child);
      const uint32_t opened = __ballot_sync(~0u, open);
      if (opened == 0) break;
      push(shared, opened, open, size, found, child, Info(rank, info.depth() + 1, product, ahead), parent);
      if ((opened & 0x80808080) == 0) break;
      open = opened >> last & 1;
    }
  }
}

template <int kBudget, int kThreads>
__global__ void __launch_bounds__(kThreads) build_trees(ddtree_tree_build_args args) {
  constexpr int kThreadBits = kThreads == 512 ? 9 : 10;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kBudget, kThreads>*>(memory);
  constexpr int kWords = Shared<kBudget, kThreads>::kWords, kNodes = Shared<kBudget, kThreads>::kNodes;
  const int64_t request = blockIdx.x;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int k = static_cast<int>(args.k), budget = static_cast<int>(args.budget), nodes = budget + 1;
  const int columns = min(k, max(budget, 1));  // a rank of `budget` or more cannot enter
  const int rows = k > 0 ? static_cast<int>(args.depth) : 0;
  const int32_t root_token = args.root_tokens[request], room = args.budgets[request];
  const float* log_probs = args.log_probs + request * rows * k;
  const float* on_spine = log_probs;
  int stride = k;
  bool sorted = true;
#pragma unroll (kBudget > 64 ? 2 : 1)
  for (int i = thread; i < rows * kBudget; i += kThreads) {
    const int row = i / kBudget, column = i % kBudget;
    if (column >= columns) continue;
    const float* x = log_probs + row * k + column;
    sorted = sorted && *x <= (column == 0 ? 0.0f : x[-1]);
    shared.cost[i] = 0.0f - *x;
  }
  for (int i = thread; i < kNodes * kWords; i += kThreads) shared.children[i] = 0;
  if (thread < static_cast<int>(sizeof shared.rank / sizeof shared.rank[0])) shared.rank[thread] = 0;
  if (thread < 4) shared.found[thread] = 0;
  if (thread < 6) shared.extremes[thread / 2][thread % 2] = thread % 2 == 0 ? ~0u : 0;
  if (thread == 0) shared.num_left = 0;
  const int limit = rows > 0 ? min(max(room, 0), budget) : 0;
  const int depth = limit > 0 ? rows : 0;
#pragma unroll 1
  for (;;) {
    if (warp == 0) {
      double sum = 0, cost = 0;
#pragma unroll 1
      for (int i = 0; i < rows; i += 8) {
#pragma unroll
        for (int j = i; j < i + 8; ++j) {
          sum += static_cast<double>(j < rows ? 0.0f - on_spine[j * stride] : 0.0f);
          cost = lane == j + 1 ? sum : cost;
        }
      }
      shared.place[lane] = lane <= depth ? Place{bits(cost), static_cast<uint64_t>(lane)} : kNever;
      shared.info[lane] = Info(0, lane, 1, lane).bits;
      shared.parent[lane] = max(lane - 1, 0);
    }
    if (__syncthreads_and(sorted)) break;
    // Not what the header allows. A tree all the same: rows are made not to decrease, and NaN is what stands before it.
    if (thread < depth) {
      float most = 0;
#pragma unroll 1
      for (int i = 0; i < columns; ++i) {
        auto& x = shared.cost[thread * kBudget + i];
        x = most = fmaxf(most, static_cast<float>(x));
      }
      shared.spine[thread] = 0.0f - static_cast<float>(shared.cost[thread * kBudget]);
    }
    on_spine = shared.spine, stride = 1, sorted = true;
    __syncthreads();
  }

  // With the spine kept, the others alone compete.
  const bool keep = args.keep_spine != 0 && limit >= depth;
  const int need = keep ? limit - depth : limit;
  Place bound{static_cast<uint64_t>(kInfinity) << 32, ~0ull};
  int size = kSpine;
  if (need > 0) {
    const int most = need + need / 2 + 8, enough = need + need / 8 + 2;
    // The first bound comes from children of the spine's nodes, one a thread, and from what is below them by the best
    // candidates.
    const int row_bits = kThreadBits - (32 - __clz(depth - 1)), row = thread >> row_bits;
    const int column = thread & ((1 << row_bits) - 1), per_row = min(columns, 1 << row_bits);
    Place candidate = kNever, below = kNever;
    if (row < depth) {
      const double above = number(shared.place[row].cost);
      if (column >= keep && column < columns) {
        candidate = {bits(above + static_cast<double>(shared.cost[row * kBudget + column])), child_path(row, column)};
      }
      const int quarter = row_bits - 2, rank = column & ((1 << quarter) - 1), steps = 1 + (column >> quarter);
      if (quarter > 0 && rank > 0 && rank < columns && row + steps < depth) {
        double sum = above + static_cast<double>(shared.cost[row * kBudget + rank]);
#pragma unroll
        for (int i = 1; i <= 4; ++i) {
          if (i <= steps) sum += static_cast<double>(shared.cost[min(row + i, depth - 1) * kBudget]);
        }
        below = {bits(sum), child_path(row, rank) + steps};
      }
    }
    const uint32_t best = shared.place[1].word(0);
    uint32_t guess = bits(shared.cost[min(per_row, need + keep) - 1]) >> 32;
    Place mine = candidate;
    int count = 2 * kThreads, rotation = 0;
    for (int turn = 0, start = 0, end = depth;; ++turn) {
      if (count > most) {
        const bool over = size > kThreads;
        count = tighten(shared.extremes, rotation, bound, mine, below, turn == 0, count, need, over ? need : enough,
                        over ? need : most, best, guess);
      }
      int* found = &shared.found[turn % 4];
      if (size > kThreads) size = kSpine;  // more than there was room for: once more, with what that taught
      const bool first = size == kSpine;
      if (first) {
        start = 0, end = depth, count = 0;
        const bool open = column > 0 && row + column < limit && !before(bound, candidate);
        const uint32_t opened = __ballot_sync(~0u, open);
        if (opened != 0) {
          push(shared, opened, open, size, found, candidate, Info(column, row + 1, column + 1, row + column + 1), row);
        }
      }
      if (!first || per_row < columns) {
        extend(shared, start, end, first ? per_row : 0, size, bound, depth, columns, limit, found);
      }
      if (thread == 0) shared.found[(turn + 1) % 4] = 0;
      __syncthreads();
      if (*found == 0) break;
      start = size, size += *found, end = size;
      count = size > kThreads ? kThreads : count + *found;
      mine = thread < size && thread >= (keep ? kSpine : 1) ? shared.place[thread] : kNever;
      guess = bound.word(0) - kOctave / 8;
    }
  }

  const Place place = thread >= kSpine && thread < size ? shared.place[thread] : kNever;
  const bool within = !before(bound, place);
  const uint32_t all_within = __ballot_sync(~0u, within);
  int slot = 0;
  if (lane == 0 && all_within != 0) slot = add(&shared.num_left, __popc(all_within));
  slot = __shfl_sync(~0u, slot, 0) + __popc(all_within & ((1u << lane) - 1));
  if (within) shared.left[slot] = place, shared.left_entry[slot] = thread;
  __syncthreads();
  // From here a thread has one of the nodes that are left: root and spine from thread 0 on, the others from kSpine on.
  const int num_left = shared.num_left;
  const bool has_node = thread <= depth || (thread >= kSpine && thread < kSpine + num_left);
  const int entry = !has_node ? 0 : thread < kSpine ? thread : shared.left_entry[thread - kSpine];
  const Info info(shared.info[entry]);
  int32_t token = root_token;
  if (entry > 0) token = args.token_ids[(request * rows + info.depth() - 1) * k + info.rank()];
  // How many go before each: of the others in the low half, of root and spine in the high one. A warp has 32 of them
  // and a share of what they are compared with.
  const int halvings = 32 - __clz((num_left + 31) / 32), shares = kThreads / 32 >> halvings;
  const int share = warp & (shares - 1), block = warp >> (kThreadBits - 5 - halvings), i = block * 32 + lane;
  if (block * 32 < kSpine + num_left) {
    const Place mine = block == 0 ? shared.place[i] : i - kSpine < num_left ? shared.left[i - kSpine] : kNever;
    int others = 0, spine = 0;
#pragma unroll 4
    for (int j = share; j < num_left; j += shares) others = less_if_before(others, shared.left[j], mine);
#pragma unroll 2
    for (int j = share; j <= depth; j += shares) spine = less_if_before(spine, shared.place[j], mine);
    atomicAdd(&shared.rank[i], static_cast<uint32_t>(-others + (-spine << 16)));
  }
  __syncthreads();
  const int num_nodes = min(limit, depth + num_left) + 1;
  int node = nodes;
  if (has_node) {
    const uint32_t ahead = shared.rank[thread];
    int others = ahead & 0xffff;
    if (keep) others = thread < kSpine ? min(others, need) : others < need ? others : nodes;
    node = others + static_cast<int>(ahead >> 16);
    if (node < num_nodes) shared.node[entry] = node;
  }
  const bool chosen = node < num_nodes;
  const int64_t at = request * nodes + node;
  if (chosen) {
    args.tokens[at] = token;
    args.depths[at] = info.depth();
    args.out_log_probs[at] = 0.0f - static_cast<float>(number(shared.place[entry].cost));
  }
  __syncthreads();
  const int words = (nodes + 31) / 32;
  int parent = -1;
  if (chosen) {
    uint32_t ancestors[kWords] = {};
    for (int j = entry, of = node;;) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) ancestors[w] |= of / 32 == w ? 1u << of % 32 : 0;
      if (j == 0) break;
      j = shared.parent[j];
      of = shared.node[j];
      if (parent < 0) parent = of;
    }
    if (parent >= 0) atomicOr(&shared.children[parent * kWords + node / 32], 1u << node % 32);
    args.parents[at] = parent;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w < words) args.ancestors[at * words + w] = ancestors[w];
    }
  }
  __syncthreads();
  if (chosen) {
    int next_token = -1, next_sibling = -1;
#pragma unroll
    for (int w = kWords - 1; w >= 0; --w) {
      const uint32_t children = shared.children[node * kWords + w];
      if (children != 0) next_token = 32 * w + __ffs(children) - 1;
      uint32_t siblings = parent < 0 || w < node / 32 ? 0 : shared.children[parent * kWords + w];
      if (w == node / 32) siblings &= ~(2u << node % 32) + 1;
      if (siblings != 0) next_sibling = 32 * w + __ffs(siblings) - 1;
    }
    args.next_token[at] = next_token;
    args.next_sibling[at] = next_sibling;
  }
  for (int i = num_nodes + thread; i < nodes; i += kThreads) {
    const int64_t at = request * nodes + i;
    args.tokens[at] = args.depths[at] = 0;
    args.parents[at] = args.next_token[at] = args.next_sibling[at] = -1;
    args.out_log_probs[at] = -INFINITY;
    for (int w = 0; w < words; ++w) args.ancestors[at * words + w] = i / 32 == w ? 1u << i % 32 : 0;
  }
  if (thread == 0) args.num_nodes[request] = num_nodes;
}

template <int kBudget, int kThreads>
int launch(const ddtree_tree_build_args& args, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kBudget, kThreads>);
  static_assert(kBytes <= 99 * 1024 && (kThreads == 512 || kThreads == 1024));
  static_assert(kSpine + Shared<kBudget, kThreads>::kLeft <= kThreads);
  const auto kernel = build_trees<kBudget, kThreads>;
  if (kBytes > 48 * 1024 &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess) {
    return ddtree::refused();
  }
  kernel<<<static_cast<unsigned>(args.batch), kThreads, kBytes, stream>>>(args);
  return ddtree::launch_status();
}

}  // namespace

size_t ddtree_tree_build_workspace(int64_t, int64_t, int64_t, int64_t) { return 0; }

int ddtree_tree_build_cuda(const ddtree_tree_build_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  if (args->batch > INT32_MAX) return DDTREE_INVALID_ARGUMENT;
  if (args->batch == 0) return DDTREE_OK;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->budget <= ddtree::heap::kMaxBudget) {
    ddtree::heap::build_trees<<<static_cast<unsigned>(args->batch), ddtree::heap::kThreads, 0, on>>>(*args);
    return ddtree::launch_status();
  }
  return args->budget <= 64 ? launch<64, 512>(*args, on) : launch<256, 1024>(*args, on);
}
