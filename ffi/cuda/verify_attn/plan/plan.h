// How the bfloat16 kernels of verify_attn share out their work.
//
// Problem. The work of a launch is the steps (64 or 32 cache rows) of all tiles (64 query rows: node and head, heads
// fastest). Every block computes from `lengths` and `num_nodes` what is its own, so the grid depends on nothing but the
// shapes.
//
// Bound. A block that shares the card with 131 others is limited by the L2 cache: all tiles of a request read the same
// rows, and each row should come from memory once. So blocks that run together must be near each other in the cache.
// And every block makes the plan before it can load anything, in each call with instructions that no cache holds yet:
// what counts is how many divisions follow one another, and how much code there is. No loop over requests is unrolled.
//
// Schedule. The steps of a request are cut into chunks of about a block's run; the order of all work is request, chunk,
// tile, step (order.h). An item is a chunk of a tile. There are four ways to share them out:
//
// - A block takes whole items: one chunk, or as many whole tiles of a request as fit in a run.
// - Where all tiles are about equally long and there is one for each block, every block first takes the same number of
//   whole tiles. What is left becomes whole items if they are hardly longer than an equal run, else it is cut.
// - Where all requests have the same number of tiles, tile t of all requests is a column, whose steps, request after
//   request, are cut into equal runs. The blocks with the same run of all columns read the same rows together. Blocks
//   that are no multiple of the tiles are left over.
// - Everything is cut into equal runs of the order. A run may cut its first and its last item; a block does the last
//   one's beginning first, so that at any time all blocks are about equally far in their chunks.
//
// The way that should take the fewest steps is taken, the earlier one of equals (choose.h). To begin a further tile
// counts as kBeginCost steps, which columns have as places before each request's own. A combining launch counts as
// kCombineCost; that runs of a column meet two items and leave splits, as kColumnCost; that runs of the order meet two
// or three and leave many, as kCutCost. Those were measured with the Hopper kernel's steps of 64 rows; the portable
// one's of 32 take about as long.
//
// A block goes through its run segment by segment (run.h). An item that is not a whole tile, or was cut, leaves splits
// in the workspace, which a second launch combines by a list of the tiles that are split (split_tiles.h).
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_PLAN_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_PLAN_H_

#include "ffi/cuda/verify_attn/plan/choose.h"
#include "ffi/cuda/verify_attn/plan/split_tiles.h"
#include "ffi/cuda/verify_attn/plan/find.h"
#include "ffi/cuda/verify_attn/plan/order.h"
#include "ffi/cuda/verify_attn/plan/run.h"

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_PLAN_PLAN_H_
