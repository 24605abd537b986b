// What a block of the Hopper kernel has in shared memory, its barriers among it.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_SHARED_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_SHARED_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/cluster.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace hopper {

constexpr int kGroupThreads = 128;
constexpr int kComputeThreads = 2 * kGroupThreads;
constexpr int kThreads = 3 * kGroupThreads;  // and one that loads, whose registers the others take
constexpr int kBoxes = DDTREE_ROW_DIM / 64;     // of a tile
constexpr int kHalfBoxes = DDTREE_LATENT_DIM / 128;
constexpr int kColumns = DDTREE_LATENT_DIM / 2;  // of a warpgroup
constexpr int kDepths = DDTREE_ROW_DIM / 16;     // matmuls that make a tile's scores
// Of those, the last ones, whose elements of the queries are kept in registers, which e4m3 has none for.
template <typename Cache>
constexpr int kHeld = sizeof(Cache) == 2 ? 6 : 0;
constexpr int kHandOver = 2;   // boxes from the end of its scores, when the first warpgroup tells the second
constexpr int kManyTiles = 8;  // of a request, from which on that pays
constexpr int kTileBytes = kBoxes * sm90::kBoxBytes;
static_assert(kTileRows == 64 && kHopperStep == 64, "a box has 64 rows");

// Named barriers; 0 is the block's own. What goes between warpgroups goes by mbarriers, at which every thread arrives,
// so tools that look for races can follow it; but for `scored`, which passes no data, and the warps that widen, of
// which one lane arrives when all have met.
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
  // It may be overwritten. Either half tells that no scores read the buffer's rotary elements any more.
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

// The boxes of a half of a tile: the columns of a warpgroup, and with the second the rotary elements.
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

// What is loaded, box by box. In clusters the query and a block's first tile come in boxes of 64 elements per row, else
// a query tile is one box; a tile of the cache is two, its halves.
struct Maps {
  CUtensorMap query, slice, halves[2];
};

}  // namespace hopper
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_SHARED_H_
