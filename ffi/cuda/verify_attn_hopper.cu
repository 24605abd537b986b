// verify_attn in bfloat16 for Hopper, over a cache of bfloat16 or e4m3: TMA loads and warpgroup products.
//
// A block keeps 64 query rows in shared memory and walks the cache 64 rows at a time, through two buffers that one warp
// fills by TMA, half a tile at a time. The output is 64 x 512 floats, half of all registers, so two warpgroups hold 256
// columns each. Tile t of a block's run belongs to warpgroup t % 2: that one multiplies it with the queries, turns the
// scores into weights, and publishes the weights (and by what the output so far shrinks) for the other; then both
// multiply the weights with their half of the tile (the exchange of weights between two warpgroups is FlashMLA's).
//
// Of two tiles, in the order in which the tensor cores get them, S scores of a tile, O the output of a half:
//
//     first warpgroup   ... O(1)    S(2)   softmax(2)   O(2)             O(3)   S(4)  softmax(4) ...
//     second warpgroup  ... O(1)           S(3)         O(2) softmax(3)  O(3)         S(5)       ...
//     loads             tile 2 has come    tile 3 has come   tile 4 begins, half by half, when both are done with 2
//
// So the first one's softmax goes on beside the second one's scores, and the second one's beside the output of the
// first one's tile. Where one waits for the other, it is told ahead: of the first one's scores before the last of them,
// and the second one's own product stands in line before its weights are published. A buffer is freed by halves, as
// each warpgroup is done with its columns; a tile's halves are filled and multiplied in the order in which they are
// freed. Rows of e4m3 come by a warpgroup that widens them (verify_widen_hopper.h).
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <stdint.h>

#include <mutex>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/tensor_map.h"
#include "ffi/cuda/verify_attn.h"
#include "ffi/cuda/verify_cluster.h"
#include "ffi/cuda/verify_plan.h"
#include "ffi/cuda/verify_segments.h"
#include "ffi/cuda/verify_widen_hopper.h"
#include "ffi/ddtree.h"

// For other architectures the kernels are traps, and nothing calls what is theirs.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177
#endif

namespace ddtree {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kComputeThreads = 2 * kGroupThreads;
constexpr int kThreads = 3 * kGroupThreads;  // and one that loads, whose registers the others take
constexpr int kBoxes = DDTREE_ROW_DIM / 64;     // of a tile
constexpr int kHalfBoxes = DDTREE_LATENT_DIM / 128;
constexpr int kColumns = DDTREE_LATENT_DIM / 2;  // of a warpgroup
constexpr int kDepths = DDTREE_ROW_DIM / 16;     // products that make a tile's scores
// Of those, the last ones, whose numbers of the queries are kept in registers, which e4m3 has none for.
template <typename Cache>
constexpr int kHeld = sizeof(Cache) == 2 ? 6 : 0;
constexpr int kHandOver = 2;   // boxes from the end of its scores, when the first warpgroup tells the second
constexpr int kManyTiles = 8;  // of a request, from which on that pays
constexpr int kTileBytes = kBoxes * sm90::kBoxBytes;
static_assert(kTileRows == 64 && kHopperStep == 64, "a box has 64 rows");

// Named barriers; 0 is the block's own. What goes between warpgroups goes by mbarriers, at which every thread arrives,
// so tools that look for races can follow it; but for `scored`, which passes no data, and the warps that widen, of which
// one lane arrives when all have met.
constexpr uint32_t kGroup = 1;  // and 2: a warpgroup by itself

// What is loaded before the plan is there: a query tile and the cache rows of a step; none if `request` is `batch`. Of
// an e4m3 cache the L2 cache is asked for the rows, and that is all.
struct Guess {
  int request, tile, step;
  __device__ __forceinline__ bool is(const Segment& s) const {
    return request == s.request && tile == s.tile && step == s.step;
  }
};

struct Shared {
  uint8_t query[kTileBytes];
  uint8_t keys[2][kTileBytes];
  uint8_t weights[sm90::kBoxBytes];
  float factor[kTileRows];   // by what a tile shrinks the output so far
  float maximum[kTileRows];  // the greatest score so far
  float sum[2][kTileRows];   // each warpgroup's share of the weights' sum
  Scales scales;
  uint64_t full[2][2];   // a half of a buffer is there
  // It may be overwritten. Either half tells that no scores read the buffer's rotary numbers any more.
  uint64_t empty[2][2];
  uint64_t query_full, query_empty;
  uint64_t started;  // the plan, the run and the first segment are there
  uint64_t guessed;  // what the guess asked for is there
  Guess guess;
  uint64_t published[2];  // the weights of a tile of a warpgroup
  uint64_t scored;        // the first warpgroup has its scores of a tile
  uint64_t summed;        // the sums of a segment are there
  uint64_t finished;      // all of a segment is done and read
  // This segment and the next one; loads may be a segment ahead.
  Segment segments[2];
  uint64_t planned[2];  // what lies there is new, from the second segment on
  Run run;
  int needed[kTries];
  // In a cluster:
  uint64_t arrived[kBoxes];  // a box of the query and of the block's first tile
  ClusterSegment share;      // the first of `segments` is the same
  int plane;                 // of the cache
  bool fetched;              // written for the loads' sake
};
static_assert(sizeof(Shared) <= 227 * 1024, "what a block may have");
static_assert(sizeof(Left) <= sizeof(Shared::keys), "a cluster's block leaves its output in their place");

// The boxes of a half of a tile: the columns of a warpgroup, and with the second the rotary numbers.
__host__ __device__ constexpr int first_box(int half) { return half * kHalfBoxes; }
__host__ __device__ constexpr int end_box(int half) { return half == 0 ? kHalfBoxes : kBoxes; }

// The barriers of loads, then the others.
template <typename Cache>
__device__ __forceinline__ void init_load_barriers(Shared& s) {
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int half = 0; half < 2; ++half) {
      sm90::init_barrier(&s.full[buffer][half], sizeof(Cache) == 2 ? 1 : kGroupThreads / 32);
      sm90::init_barrier(&s.empty[buffer][half], kGroupThreads / 32);
    }
  }
  for (int box = 0; box < kBoxes; ++box) sm90::init_barrier(&s.arrived[box], 2);
  sm90::fence_barrier_init();
}

__device__ __forceinline__ void init_barriers(Shared& s) {
  for (int i = 0; i < 2; ++i) sm90::init_barrier(&s.planned[i], 1);
  for (int i = 0; i < 2; ++i) sm90::init_barrier(&s.published[i], kGroupThreads);
  sm90::init_barrier(&s.scored, kGroupThreads / 32);
  sm90::init_barrier(&s.summed, kComputeThreads);
  sm90::init_barrier(&s.finished, kComputeThreads);
  sm90::init_barrier(&s.started, 1);
  sm90::init_barrier(&s.guessed, 1);
  sm90::init_barrier(&s.query_full, 1);
  sm90::init_barrier(&s.query_empty, kComputeThreads / 32);
  sm90::fence_barrier_init();
}

// What is loaded, box by box. In clusters the query and a block's first tile come in boxes of 64 numbers a row, else a
// query tile is one box; a tile of the cache is two, its halves.
struct Maps {
  CUtensorMap query, slice, halves[2];
};

// Loads a half of a tile.
__device__ __forceinline__ void load_half(uint8_t* keys, const Maps& maps, uint64_t* barrier, int half, int step,
                                          int plane) {
  sm90::load_box(keys + first_box(half) * sm90::kBoxBytes, &maps.halves[half], barrier, step * kHopperStep,
                 first_box(half), plane);
}

// Loads the tiles of steps [step, end_step) of a plane of the cache; `tile` is the next of the block's run.
//
// Where a request has many tiles, whose blocks go through the same rows at about the same time, they ask the L2 cache
// for steps ahead by turns; `own` is the segment's tile. Where not all of them run at once, nobody asks for some steps.
__device__ __forceinline__ void load_steps(Shared& s, const Maps& maps, int plane, int step, int end_step, int tiles,
                                           int own, uint32_t* tile) {
  int ahead = end_step;
  tiles = min(tiles, gridDim.x);
  if (tiles >= kManyTiles) {
    own -= over(own, tiles) * tiles;
    const int first = step + kAhead, wave = over(first, tiles) * tiles + own;
    ahead = wave < first ? wave + tiles : wave;
  }
#pragma unroll 1  // this thread has 24 registers
  for (; step < end_step; ++step, ++*tile) {
    const int buffer = *tile % 2;
    for (int i = 0; i < 2; ++i) {
      const int half = i ^ buffer;
      sm90::wait(&s.empty[buffer][half], *tile / 2 % 2 ^ 1);
      sm90::arrive_expecting(&s.full[buffer][half], (end_box(half) - first_box(half)) * sm90::kBoxBytes);
      load_half(s.keys[buffer], maps, &s.full[buffer][half], half, step, plane);
    }
    if (step + kAhead == ahead && ahead < end_step) {
      for (int half = 0; half < 2; ++half) {
        sm90::prefetch_box(&maps.halves[half], ahead * kHopperStep, first_box(half), plane);
      }
      ahead += tiles;
    }
  }
}

// Loads a cluster block's first tile, which is waited for box by box.
__device__ __forceinline__ void load_first_step(Shared& s, const Maps& maps, int plane, int step) {
  for (int box = 0; box < kBoxes; ++box) {
    sm90::arrive_expecting(&s.arrived[box], sm90::kBoxBytes);
    sm90::load_box(s.keys[0] + box * sm90::kBoxBytes, &maps.slice, &s.arrived[box], step * kHopperStep, box, plane);
  }
  for (int half = 0; half < 2; ++half) sm90::arrive(&s.full[0][half]);
}

// With what a block begins where all requests have all nodes and about the same length.
__device__ __forceinline__ Guess guess_start(const Problem& p) {
  const int tiles = shape_tiles(p.nodes, p.heads), all = p.batch * tiles, blocks = gridDim.x, block = blockIdx.x;
  // Whole tiles, or as many chunks of each as there are blocks for.
  const int chunks = max(over(blocks, all), 1), rounds = max(over(all, blocks), 1);
  if (all <= blocks) {
    // Or columns, as start_run chooses.
    const int steps = request_of(p, 0).steps, places = steps + kBeginCost;
    const Totals totals{all * steps, all, steps, steps, tiles, p.batch * places};
    const int run = column_run(totals, blocks);
    if (run + kColumnCost < whole_cost(totals, over(steps + chunks - 1, chunks), 1)) {
      const int number = over(block, tiles), request = over(number * run, places), tile = block - number * tiles;
      if (request >= p.batch || tile >= request_of(p, request).tiles) return {p.batch, 0, 0};
      return {request, tile, max(number * run - request * places - kBeginCost, 0)};
    }
  }
  const int place = rounds * block, request = over(place, chunks * tiles);
  if (request >= p.batch) return {p.batch, 0, 0};
  const Request r = request_of(p, request);
  const int in_request = place - request * chunks * tiles, chunk = over(in_request, tiles);
  const int tile = in_request - chunk * tiles;
  return {tile < r.tiles ? request : p.batch, tile, chunk_begin(r.steps, chunks, chunk)};
}

// Loads it while the plan is made.
__device__ __forceinline__ void load_guess(const Problem& p, Shared& s, const Maps& maps) {
  const Guess guess = s.guess;
  if (guess.request == p.batch) return;
  sm90::arrive_expecting(&s.guessed, 2 * kTileBytes);
  sm90::load_box(s.query, &maps.query, &s.guessed, query_row(p, guess.request, guess.tile), 0, 0);
  const int plane = layer_of(p.layer, p.layers) * p.batch + guess.request;
  for (int half = 0; half < 2; ++half) load_half(s.keys[0], maps, &s.guessed, half, guess.step, plane);
}

// What the loading warp does, by one thread.
__device__ void load_tiles(const Problem& p, Shared& s, const Maps& maps) {
  const int layer = layer_of(p.layer, p.layers);
  uint32_t tile = 0;  // of the block's run
  bool loaded = false;
  if (s.guess.request < p.batch) {
    sm90::wait(&s.guessed, 0);  // right or not: nothing else may go there before
    loaded = s.guess.is(s.segments[0]);
  }
  for (uint32_t number = 0;; ++number) {
    if (number >= 1) sm90::wait(&s.planned[number % 2], (number - 1) / 2 % 2);
    const Segment& segment = s.segments[number % 2];
    const int request = segment.request, end_step = segment.end_step, own = segment.tile;
    const int tiles = over(segment.nodes * p.heads + kTileRows - 1, kTileRows);
    int step = segment.step;
    if (request == p.batch) return;
    if (loaded) {
      sm90::arrive(&s.query_full);
      for (int half = 0; half < 2; ++half) sm90::arrive(&s.full[0][half]);
      ++step;
      ++tile;
      loaded = false;
    } else {
      sm90::wait(&s.query_empty, number % 2 ^ 1);
      sm90::arrive_expecting(&s.query_full, kTileBytes);
      sm90::load_box(s.query, &maps.query, &s.query_full, query_row(p, request, own), 0, 0);
    }
    load_steps(s, maps, layer * p.batch + request, step, end_step, tiles, own, &tile);
  }
}

// What the warps that widen do, of which this is `warp`.
__device__ __forceinline__ void widen_halves(const Problem& p, Shared& s, const Maps& maps, int warp, int lane) {
  constexpr int kWarps = kGroupThreads / 32;
  const auto load_query = [&](uint32_t number, const Segment& segment) {
    sm90::wait(&s.query_empty, number % 2 ^ 1);
    sm90::arrive_expecting(&s.query_full, kTileBytes);
    sm90::load_box(s.query, &maps.query, &s.query_full, query_row(p, segment.request, segment.tile), 0, 0);
  };
  const auto half_of = [](uint32_t tile, int i) { return i ^ static_cast<int>(tile % 2); };
  const auto widen = [&](uint32_t tile, const widening::Piece<kWarps>& piece, int half, int warp, int lane) {
    const int buffer = tile % 2;
    sm90::wait(&s.empty[buffer][half], tile / 2 % 2 ^ 1);
    piece.store(s.keys[buffer], s.keys[buffer] + (kBoxes - 1) * sm90::kBoxBytes, half, warp, lane);
    sm90::fence_writes();
    __syncwarp();
    if (lane == 0) sm90::arrive(&s.full[buffer][half]);
  };
  widening::widen_tiles<kWarps>(p, s, warp, lane, load_query, half_of, widen);
}

// What a cluster's block does before its threads part. Its first tile is asked for before lengths have been read; the
// query as soon as all blocks' barriers are there, a box by each block for all of them.
//
// All warps wait for the cluster before they meet again, though only the loading one needs it: racecheck lets no warp
// past that wait until all of its block have come there, as does the code that ptxas makes of it for launches without
// clusters. That costs nothing, since what is waited for is that all have arrived.
__device__ __forceinline__ void start_cluster_block(const Problem& p, Shared& s, const Maps& maps, int thread) {
  const int size = cluster::size(), rank = blockIdx.x % size, tiles = shape_tiles(p.nodes, p.heads);
  const int place = blockIdx.x / size, request = place / tiles, box_rows = query_box_rows(p);
  if (thread == kComputeThreads) {
    const int layer = p.layers == 1 ? 0 : layer_of(p.layer, p.layers);
    init_load_barriers<__nv_bfloat16>(s);
    s.plane = layer * p.batch + request;
  }
  __syncwarp();
  cluster::arrive_relaxed();  // the barriers' own fence has made them known
  if (thread == kComputeThreads) {
    load_first_step(s, maps, s.plane, rank);
    for (int box = 0; box < kBoxes; ++box) sm90::arrive_expecting(&s.arrived[box], box_rows * 128);
  } else if (thread == kComputeThreads + 32) {
    s.share = cluster_segment(p, blockIdx.x, size, true);
    s.segments[0] = s.share;
  } else if (thread == kComputeThreads + 64) {
    init_barriers(s);
  } else if (thread < kComputeThreads) {
    // Rows that no load fills: their scores are nothing's, but whatever memory held would make them rescale.
    for (int i = thread; i < kBoxes * (kTileRows - box_rows) * 8; i += kComputeThreads) {
      const int box = i / ((kTileRows - box_rows) * 8), chunk = i - box * ((kTileRows - box_rows) * 8);
      reinterpret_cast<uint4*>(s.query + box * sm90::kBoxBytes + box_rows * 128)[chunk] = make_uint4(0, 0, 0, 0);
    }
    sm90::fence_writes();
  }
  __syncwarp();
  cluster::wait();  // all blocks' barriers are there
  if (thread == kComputeThreads) {
    const int row = query_row(p, request, place - request * tiles);
    for (int box = rank; box < kBoxes; box += size) {
      sm90::load_box_for_all(s.query + box * sm90::kBoxBytes, &maps.query, &s.arrived[box], row, box, 0,
                             (1 << size) - 1);
    }
  }
  __syncwarp();
}

// Brings the ancestors of a tile's nodes near, for the masked steps, which are a block's last.
__device__ __forceinline__ void fetch_ancestors(const Problem& p, Shared& s, int lane) {
  const ClusterSegment& segment = s.share;
  const int count = step_count(segment);
  if (count == 0 || (step_at(segment, count - 1) + 1) * kHopperStep <= segment.length) return;
  const int row = segment.tile * kTileRows;
  const int first = row / p.heads, last = min((row + kTileRows - 1) / p.heads, segment.nodes - 1);
  const uint32_t* ancestors = p.ancestors + static_cast<int64_t>(segment.request) * p.nodes * p.words;
  uint32_t all = 0;
  for (int i = first * p.words + lane; i < (last + 1) * p.words; i += 32) all |= ancestors[i];
  if (__any_sync(~0u, all != 0) && lane == 0) s.fetched = true;
}

// Makes a buffer's latent numbers zero from row `end` on, and what is not finite in rows [first, end). A node's row may
// be NaN, and nodes that do not see it multiply it by zero; by now it has made the scores of those that do see it NaN.
__device__ __forceinline__ void clear_not_finite(uint8_t* keys, int first, int end, int thread) {
#pragma unroll 1
  for (int i = first * 8 + thread; i < kTileRows * 8; i += kGroupThreads) {
#pragma unroll 1
    for (int box = 0; box < 2 * kHalfBoxes; ++box) {
      uint4& x = reinterpret_cast<uint4*>(keys + box * sm90::kBoxBytes)[i];
      x = i / 8 < end ? finite(x) : make_uint4(0, 0, 0, 0);
    }
  }
}

// Starts the product of the queries with half `kHalf` of tile `tile`; with kFirst the scores begin with it. A warpgroup
// must issue faster than the tensor cores work, so nothing but products is between the products of a half. What of the
// queries is `held` in registers spares reads of shared memory, which limits these products.
//
// The first warpgroup's last half is two groups: the second one begins when the first of them is done. The rotary
// numbers of an e4m3 tile are there when both halves are.
template <int kSide, int kHalf, bool kFirst, typename Cache>
__device__ __forceinline__ void start_scores(Shared& s, uint32_t tile, const uint32_t (&held)[kHeld<Cache> + 1][4],
                                             float (&score)[32]) {
  constexpr bool kBf16 = sizeof(Cache) == 2;
  constexpr int kEnd = kBf16 ? end_box(kHalf) : first_box(kHalf) + kHalfBoxes + !kFirst;
  const uint64_t query = sm90::along_rows(sm90::shared_address(s.query));
  const uint64_t keys = sm90::along_rows(sm90::shared_address(s.keys[kSide]));
  sm90::wait(&s.full[kSide][kHalf], tile / 2 % 2);
  sm90::begin_products();
#pragma unroll
  for (int at = first_box(kHalf); at < kEnd; ++at) {
    const int box = at < first_box(kHalf) + kHalfBoxes ? at : kBoxes - 1;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = box * sm90::kBoxBytes + k * 32;
      const bool add = !kFirst || at > first_box(kHalf) || k > 0;
      const int depth = box * 4 + k - (kDepths - kHeld<Cache>);
      if (kSide == 0 && box == kBoxes - kHandOver && k == 0) sm90::end_products();
      if (depth >= 0) {
        sm90::multiply_64(score, held[max(depth, 0)], sm90::further(keys, offset), add);
      } else {
        sm90::multiply_64(score, sm90::further(query, offset), sm90::further(keys, offset), add);
      }
    }
  }
  sm90::end_products();
}

// The scores of a cluster block's first tile, each box as it arrives.
__device__ __forceinline__ void start_first_scores(Shared& s, float (&score)[32]) {
  const uint64_t query = sm90::along_rows(sm90::shared_address(s.query));
  const uint64_t keys = sm90::along_rows(sm90::shared_address(s.keys[0]));
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    sm90::wait(&s.arrived[box], 0);
    sm90::begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = box * sm90::kBoxBytes + k * 32;
      sm90::multiply_64(score, sm90::further(query, offset), sm90::further(keys, offset), box > 0 || k > 0);
    }
    sm90::end_products();
  }
}

// Scores of a thread's two rows to weights, as the second product takes them from registers: four depths of 16 cache
// rows. `factor` becomes what the output so far shrinks by.
__device__ __forceinline__ void weigh(float (&score)[32], float (&maximum)[2], float (&sum)[2], float (&factor)[2],
                                      uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = maximum[half];
#pragma unroll
    for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(score[n * 4 + half * 2], score[n * 4 + half * 2 + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const bool replaced = top > maximum[half] + kSlack;
    // What nothing has been added to need not shrink.
    factor[half] = replaced && maximum[half] != -INFINITY ? power_of_two(maximum[half] - top) : 1.0f;
    if (replaced) maximum[half] = top;
    const float shift = maximum[half] == -INFINITY ? 0.0f : maximum[half];  // nothing seen so far
    sum[half] *= factor[half];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float x = power_of_two(score[n * 4 + half * 2] - shift);
      const float y = power_of_two(score[n * 4 + half * 2 + 1] - shift);
      sum[half] += x + y;
      weights[n / 2][n % 2 * 2 + half] = pack(x, y);
    }
  }
}

__device__ __forceinline__ void rescale(float (&out)[kColumns / 2], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    out[n * 4] *= factor[0];
    out[n * 4 + 1] *= factor[0];
    out[n * 4 + 2] *= factor[1];
    out[n * 4 + 3] *= factor[1];
  }
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Stores a warp's 16 rows of a warpgroup's columns, `pair` of each two numbers: the thread's upper row from to[0] on,
// the one 8 below from to[1] on, where they are `real`. Goes through `staging`, 1 KB for the warp, 32 columns at a
// time: threads hold two columns of a row each, and memory wants sectors.
template <typename Number, typename Pair>
__device__ __forceinline__ void store_rows(const float (&out)[kColumns / 2], uint8_t* staging, int lane,
                                           const bool (&real)[2], Number* const (&to)[2], const Pair& pair) {
  static_assert(sizeof(Number) == 2, "a pair is a word");
  const auto chunk = [&](int row, int column) {
    return sm90::shared_address(staging) + row * 64 + ((column ^ row / 2 % 4) << 4);
  };
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 4) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = (n + i + k / 2) * 4 + k % 2 * 2;
        x[k] = pair(k % 2, out[at], out[at + 1]);
      }
      sm90::store_matrices(chunk(lane % 16, i + lane / 16), x);
    }
    __syncwarp();
    uint4 x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) x[half] = load_shared(chunk(half * 8 + lane / 4, lane % 4));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (real[half]) *reinterpret_cast<uint4*>(to[half] + (n + lane % 4) * 8) = x[half];
    }
  }
}

// The same number, from which the compiler can prepare nothing before all the loops: what it kept would not fit in the
// registers.
__device__ __forceinline__ int hidden(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a warpgroup does; `thread` counts inside it. In a cluster, whose blocks have one segment, it returns its output
// and the maxima, and the sums are there.
template <int kSide, bool kCluster, typename Cache>
__device__ __forceinline__ void attend_side(const Problem& p, Shared& s, int thread, float (&out)[kColumns / 2],
                                            float (&maximum)[2]) {
  const int warp = thread / 32, lane = thread % 32;
  const int upper = warp * 16 + lane / 4;  // the thread's rows are this one and the one 8 below
  uint32_t tile = 0;                       // of the block's run
  constexpr bool kBf16 = sizeof(Cache) == 2;
  uint32_t held[kHeld<Cache> + 1][4];  // the last one is never used, since there is no array of none
  float score[32];
  const auto hold_query = [&](uint32_t number) {
    if (kCluster) {
      for (int box = 0; box < kBoxes; ++box) sm90::wait(&s.arrived[box], 0);
    } else {
      sm90::wait(&s.query_full, number % 2);
    }
    const int place = hidden(thread), row = place / 32 * 16 + place % 16;
    const uint32_t from = sm90::shared_address(s.query) + row * 128;
#pragma unroll
    for (int i = 0; i < kHeld<Cache>; ++i) {
      const int depth = kDepths - kHeld<Cache> + i;
      load_matrices(held[i],
                    from + depth / 4 * sm90::kBoxBytes + ((depth % 4 * 2 + place % 32 / 16 ^ row % 8) << 4));
    }
  };
  const auto begin_scores = [&] {
    start_scores<kSide, kSide, true, Cache>(s, tile, held, score);
    start_scores<kSide, kSide ^ 1, false, Cache>(s, tile, held, score);
  };
  const auto end_scores = [&] {
    if (kSide == 0) {
      // Told when they are all but done, or the tensor cores would idle while it hears of it.
      sm90::wait_products<1>();
      if (lane == 0) sm90::arrive(&s.scored);
    }
    sm90::wait_products<0>();
    sm90::pin(score);
  };
  if (kCluster) {
    if (kSide == 0 && s.share.lead > 0) {
      start_first_scores(s, score);
      end_scores();
    }
    hold_query(0);
  } else if (s.segments[0].request < p.batch) {
    hold_query(0);
    if (kSide == 0) {
      begin_scores();
      end_scores();
    }
  }
  for (uint32_t number = 0;; ++number) {
    if (s.segments[number % 2].request == p.batch) return;
    // Read where it is needed: registers are what a thread lacks.
    const Segment& segment = s.segments[number % 2];
    const uint32_t first = tile, end = tile + (kCluster ? step_count(s.share) : segment.end_step - segment.step);
    // The first tile with a row that not all nodes see.
    int masked = static_cast<int>(tile) + segment.length / kHopperStep - segment.step;
    if (kCluster) masked = s.share.first >= segment.length / kHopperStep ? 0 : max(masked, 0) + 1;

    float sum[2] = {}, factor[2];
    maximum[0] = maximum[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) out[i] = 0;
    sm90::wait(&s.finished, number % 2 ^ 1);  // nobody still reads sums or stored rows of the segment before
    if (!kBf16 && kSide == 1 && thread == 0) plan_segment(p, s, number + 1);  // all others are busy
    if (first % 2 != kSide && first + 1 == end && lane == 0) sm90::arrive(&s.query_empty);  // it multiplies none

    // The tile of the other warpgroup: its weights times this one's columns. The other one has seen the tile arrive.
    const auto other_tile = [&] {
      sm90::wait(&s.published[kSide ^ 1], tile / 2 % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half] = s.factor[upper + half * 8];
        maximum[half] = s.maximum[upper + half * 8];
        sum[half] *= factor[half];
      }
      // Over all rows, since the warps of a group must wait together.
      if (__builtin_expect(__any_sync(~0u, s.factor[lane] != 1.0f || s.factor[lane + 32] != 1.0f), 0)) {
        sm90::wait_products<0>();  // none may be under way while registers of one change
        sm90::pin(out);
        rescale(out, factor);
      }
      sm90::begin_products();
      const uint64_t weights = sm90::along_rows(sm90::shared_address(s.weights));
      const uint64_t values =
          sm90::down_rows(sm90::shared_address(s.keys[kSide ^ 1] + first_box(kSide) * sm90::kBoxBytes));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sm90::multiply_256(out, sm90::further(weights, k * 32), sm90::further(values, k * 2048));
      }
      sm90::end_products();
    };
    // A tile of this one: scores, weights, and the product.
    const auto own_tile = [&] {
      if (tile + 2 >= end && lane == 0) sm90::arrive(&s.query_empty);
#pragma unroll
      for (int i = 0; i < 32; ++i) score[i] *= kBf16 ? p.log2_scale : s.scales.score;
      if (__builtin_expect(static_cast<int>(tile) >= masked, 0)) {
        // Of a row that is not finite no score is.
        bool broken = false;
#pragma unroll
        for (int i = 0; i < 32; ++i) broken |= !(fabsf(score[i]) <= FLT_MAX);
        // Of the tile's first row, counted from the tree's.
        const int step = kCluster && tile == 0 ? s.share.first : segment.end_step - static_cast<int>(end - tile);
        const int row = step * kHopperStep - segment.length;
        if (sm90::any_at(kGroup + kSide, kGroupThreads, broken)) {
          clear_not_finite(s.keys[kSide], max(-row, 0), segment.nodes - row, thread);
          sm90::fence_writes();
          sm90::sync_at(kGroup + kSide, kGroupThreads);
        }
        // Of four threads with the same two rows each makes one word of what these see.
        const int place = hidden(thread), own_row = place / 32 * 16 + place % 32 / 4 + place / 2 % 2 * 8;
        const int node = min((segment.tile * kTileRows + own_row) / p.heads, segment.nodes - 1);
        const uint32_t* ancestors = p.ancestors + (static_cast<int64_t>(segment.request) * p.nodes + node) * p.words;
        const uint32_t own_word = visible(ancestors, p.words, row + place % 2 * 32, segment.nodes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const uint32_t seen = __shfl_sync(~0u, own_word, half * 2 + w, 4) >> lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              float& x = score[(w * 4 + i / 2) * 4 + half * 2 + i % 2];
              x = seen >> (i / 2 * 8 + i % 2) & 1 ? (fabsf(x) <= FLT_MAX ? x : NAN) : -INFINITY;
            }
          }
        }
      }
      uint32_t weights[4][4];
      weigh(score, maximum, sum, factor, weights);
      const auto multiply = [&] {
        sm90::begin_products();
        const uint64_t values =
            sm90::down_rows(sm90::shared_address(s.keys[kSide] + first_box(kSide) * sm90::kBoxBytes));
#pragma unroll
        for (int k = 0; k < 4; ++k) sm90::multiply_256(out, weights[k], sm90::further(values, k * 2048));
        sm90::end_products();
      };
      const bool shrinks = factor[0] != 1.0f || factor[1] != 1.0f;
      if (kSide == 0) {
        sm90::wait_products<0>();
        sm90::pin(out);
        if (__builtin_expect(__any_sync(~0u, shrinks), 0)) rescale(out, factor);
      } else {
        // No scores are under way beside this softmax, only the product with the other's tile: when that ends, this
        // product must stand in line, and cannot wait until the weights have been published. Its operands are only read
        // until it is done.
        if (__builtin_expect(sm90::any_at(kGroup + kSide, kGroupThreads, shrinks), 0)) {
          sm90::wait_products<0>();  // none may be under way while registers of one change
          sm90::pin(out);
          rescale(out, factor);
        }
        multiply();
        sm90::wait_products<1>();
        if (tile > first && lane == 0) sm90::arrive(&s.empty[0][1]);
      }
      sm90::sync_at(kGroup + kSide, kGroupThreads);  // no warp's product still reads the weights of the tile before
      {
        const int place = hidden(thread), row = place / 32 * 16 + place % 16;
        const uint32_t to = sm90::shared_address(s.weights) + row * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) sm90::store_matrices(to + ((k * 2 + place % 32 / 16 ^ row % 8) << 4), weights[k]);
      }
      if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          s.factor[upper + half * 8] = factor[half];
          s.maximum[upper + half * 8] = maximum[half];
        }
      }
      sm90::fence_writes();
      sm90::arrive(&s.published[kSide]);
      if (kSide == 0) multiply();
      sm90::wait_products<0>();
      sm90::pin(out);
      if (lane == 0) sm90::arrive(&s.empty[kSide][kSide]);
    };
    for (bool scored = first % 2 == kSide && first < end; scored || tile + 1 < end; scored = false) {
      if (!scored) {
        if (kSide == 0) {
          other_tile();
          start_scores<0, 0, true, Cache>(s, tile + 1, held, score);
          sm90::wait_products<1>();
          sm90::pin(out);
          if (lane == 0) sm90::arrive(&s.empty[1][0]);
          start_scores<0, 1, false, Cache>(s, tile + 1, held, score);
          end_scores();
        } else {
          // After the other's scores: their softmax then goes on beside this product.
          sm90::wait(&s.scored, tile / 2 % 2);
          start_scores<1, 1, true, Cache>(s, tile + 1, held, score);
          start_scores<1, 0, false, Cache>(s, tile + 1, held, score);
          other_tile();
          sm90::wait_products<1>();
          sm90::pin(score);
        }
        ++tile;
      }
      own_tile();
      ++tile;
    }
    if (tile < end) {
      if (kSide == 1) sm90::wait(&s.scored, tile / 2 % 2);  // every phase of a barrier is waited for
      other_tile();
      sm90::wait_products<0>();
      sm90::pin(out);
      if (lane == 0) sm90::arrive(&s.empty[kSide ^ 1][kSide]);
      ++tile;
    }

    // The next segment is planned. Also, whoever plans has then seen the end of the one before: it could not tell two
    // ends from none.
    if (!kCluster) sm90::wait(&s.planned[(number + 1) % 2], number / 2 % 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if (lane % 4 == 0) s.sum[kSide][upper + half * 8] = sum[half];
    }
    sm90::arrive(&s.summed);
    if (kCluster) {
      sm90::wait(&s.summed, 0);
      return;
    }
    const auto write = [&] {
      sm90::wait(&s.summed, number % 2);
      const bool whole = segment.step == 0 && segment.end_step == segment.steps;
      const int place = hidden(thread), lane = place % 32, row = place / 32 * 16 + lane / 4;
      uint8_t* staging = s.weights + (kSide * 4 + place / 32) * 1024;  // all have read the last weights
      const int query_row = segment.tile * kTileRows + row, real_rows = segment.nodes * p.heads;
      const bool real[2] = {query_row < real_rows, query_row + 8 < real_rows};
      const float total[2] = {s.sum[0][row] + s.sum[1][row], s.sum[0][row + 8] + s.sum[1][row + 8]};
      if (whole) {
        const int64_t index = static_cast<int64_t>(segment.request) * p.nodes * p.heads + query_row;
        __nv_bfloat16* to = p.out + index * DDTREE_LATENT_DIM + kSide * kColumns;
        const float scale = kBf16 ? 1.0f : s.scales.value;
        const float inverse[2] = {reciprocal(total[0]) * scale, reciprocal(total[1]) * scale};
        const auto pair = [&](int half, float x, float y) { return pack(x * inverse[half], y * inverse[half]); };
        store_rows<__nv_bfloat16>(out, staging, lane, real, {to, to + 8 * DDTREE_LATENT_DIM}, pair);
      } else {
        __half* part = reinterpret_cast<__half*>(part_of<__half>(p, blockIdx.x, segment.part));
        float down[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float greatest = 0;
#pragma unroll
          for (int n = 0; n < kColumns / 4; ++n) greatest = fmaxf(greatest, fabsf(out[n / 2 * 4 + half * 2 + n % 2]));
          greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 1));
          greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 2));
          const HalfScale scale(greatest);
          down[half] = scale.down;
          if (real[half] && lane % 4 == 0) {
            PartRow* said = reinterpret_cast<PartRow*>(part + kTileRows * DDTREE_LATENT_DIM) + row + half * 8;
            said->scale[kSide] = scale.up;
            if (kSide == 0) *reinterpret_cast<float2*>(said) = make_float2(maximum[half], total[half]);
          }
        }
        __half* to = part + row * DDTREE_LATENT_DIM + kSide * kColumns;
        const auto pair = [&](int half, float x, float y) { return pack_half(x * down[half], y * down[half]); };
        store_rows<__half>(out, staging, lane, real, {to, to + 8 * DDTREE_LATENT_DIM}, pair);
      }
    };
    const bool more = s.segments[(number + 1) % 2].request < p.batch;
    if (more && tile % 2 == kSide) {
      // The next products go on while this is written.
      hold_query(number + 1);
      begin_scores();
      write();
      end_scores();
    } else {
      write();
      if (more) hold_query(number + 1);
    }
    sm90::arrive(&s.finished);
  }
}

template <bool kCluster, typename Cache>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const Problem p, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, lane = thread % 32;
  constexpr bool kBf16 = sizeof(Cache) == 2;
  if (kCluster) {
    start_cluster_block(p, s, maps, thread);
    __syncthreads();
  } else {
    if (thread == kComputeThreads) {
      s.guess = guess_start(p);
    } else if (thread == kComputeThreads + 32) {
      sm90::prefetch(&maps.query);
      for (int half = 0; half < 2 && kBf16; ++half) sm90::prefetch(&maps.halves[half]);
    } else if (thread == kComputeThreads + 64) {
      init_load_barriers<Cache>(s);
      init_barriers(s);
    } else if (!kBf16 && thread == kComputeThreads + 96) {
      s.scales = scales_of(p);
    }
    start_run<true>(p, s.needed, &s.run);
    // Not before lengths are there, or the plan would wait for them behind these loads. To issue them takes as long as
    // the rest of the plan: nobody waits for this thread.
    if (thread == kComputeThreads) {
      if (kBf16) {
        load_guess(p, s, maps);
      } else if (s.guess.request < p.batch) {
        widening::prefetch_step(widening::first_row(p, s.guess.request, s.guess.step),
                                p.rows - s.guess.step * kHopperStep);
      }
    }
    if (thread == 0) {
      next_segment(p, &s.run, &s.segments[0]);
      sm90::arrive(&s.started);
    }
    sm90::wait(&s.started, 0);
  }
  // As the compiler must know, a warpgroup goes one way.
  const int group = __shfl_sync(~0u, thread / kGroupThreads, 0);
  if (group == 2) {
    sm90::give_registers<kBf16 ? 24 : 72>();
    if (kCluster) {
      if (thread == kComputeThreads) {
        uint32_t tile = 1;
        load_steps(s, maps, s.plane, s.share.step, s.share.end_step, 1, 0, &tile);
      }
      if (thread >= kComputeThreads + 96) fetch_ancestors(p, s, lane);
    } else if (kBf16) {
      if (thread == kComputeThreads) load_tiles(p, s, maps);
      if (thread == kComputeThreads + 32) plan_segments(p, s);
    } else {
      widen_halves(p, s, maps, __shfl_sync(~0u, thread / 32, 0) - kComputeThreads / 32, lane);
    }
  } else {
    sm90::take_registers<kBf16 ? 240 : 216>();
    float out[kColumns / 2], maximum[2];
    if (group == 0) {
      attend_side<0, kCluster, Cache>(p, s, thread, out, maximum);
    } else {
      // This one has nothing to do until the other one has weights.
      if (!kCluster) list_cut_tiles(p, s.run, (thread - kGroupThreads) / 32, kGroupThreads / 32, lane);
      attend_side<1, kCluster, Cache>(p, s, thread - kGroupThreads, out, maximum);
    }
    if (kCluster) {
      // No product reads the keys any more: the output is left in their place.
      Left* left = reinterpret_cast<Left*>(s.keys);
      leave_output(p, s.segments[0], left, thread, out, maximum, s.sum);
      merge_cluster<kComputeThreads / 32>(p, s.segments[0], left, thread);
    }
  }
#else
  __trap();  // built for another architecture than the card's
#endif
}

template <bool kCluster, typename Cache>
int launch(const Problem& p, int blocks, int size, cudaStream_t stream) {
  Maps maps{};
  bool made = kCluster ? encode_query(p, query_box_rows(p), 1, &maps.query) &&
                             encode_cache(p, kHopperStep, 1, &maps.slice)
                       : encode_query(p, kTileRows, kBoxes, &maps.query);
  for (int half = 0; half < 2 && sizeof(Cache) == 2; ++half) {
    made = made && encode_cache(p, kHopperStep, end_box(half) - first_box(half), &maps.halves[half]);
  }
  if (!made) return ddtree::refused();
  return launch_clusters(attend<kCluster, Cache>, kThreads, sizeof(Shared), blocks, size, stream, p, maps);
}

// What a card runs: whether the code is Hopper's own, and how many clusters of each size at once.
struct Card {
  std::once_flag asked;
  bool built = false;
  int fits[kMostCluster + 1] = {};
};

void ask(Card* card) {
  // Compiled for anything else, plain sm_90 too, the kernel is a trap of 4 registers instead of 168 (ptxas_test.py).
  cudaFuncAttributes code;
  card->built = cudaFuncGetAttributes(&code, attend<false, __nv_bfloat16>) == cudaSuccess && code.numRegs > 100;
  const auto kernel = attend<true, __nv_bfloat16>;
  if (card->built && allow_launch(kernel, sizeof(Shared), kMostCluster)) {
    for (int size = 1; size <= kMostCluster; ++size) {
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = cluster_config(kThreads, sizeof(Shared), size, size, nullptr, &attribute);
      if (cudaOccupancyMaxActiveClusters(&card->fits[size], kernel, &config) != cudaSuccess) card->fits[size] = 0;
    }
  }
  cudaGetLastError();  // the answer, not an error of the launch to come
}

// Null for a device beyond those that are kept.
const Card* card_of(int device) {
  static Card cards[64];
  if (device >= static_cast<int>(sizeof(cards) / sizeof(cards[0]))) return nullptr;
  std::call_once(cards[device].asked, ask, &cards[device]);
  return &cards[device];
}

}  // namespace

bool hopper_built(int device) {
  const Card* card = card_of(device);
  return card != nullptr && card->built;
}

int hopper_cluster(const Problem& p, int device, int processors) {
  if (p.e4m3) return 0;  // there are no such kernels
  return cluster_size(p.batch, shape_tiles(p.nodes, p.heads), ceil_div(p.rows, kHopperStep), processors,
                      card_of(device)->fits);
}

int attend_hopper(const Problem& p, int blocks, int size, cudaStream_t stream) {
  if (size > 0) blocks = size * p.batch * shape_tiles(p.nodes, p.heads);
  if (p.nodes * p.heads <= kFewRows) return attend_few_hopper(p, blocks, size, stream);
  if (p.e4m3) return launch<false, uint8_t>(p, blocks, 1, stream);
  return size > 0 ? launch<true, __nv_bfloat16>(p, blocks, size, stream)
                  : launch<false, __nv_bfloat16>(p, blocks, 1, stream);
}

}  // namespace ddtree
