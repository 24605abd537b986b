// verify_attn in bfloat16 for Hopper (sm_90a), over a cache of bfloat16 or e4m3: TMA loads and warpgroup matmuls.
//
// Problem: a tile of 64 rows (node and head, heads fastest) over a request's cache, 64 cache rows per step.
//
// Bound. The tensor cores take 2,176 cycles per step. Shared memory at 128 bytes per cycle takes more: 576 cycles for
// rows that come, 576 and 480 for reading rows and queries for scores, 512 for the output, 128 for weights. So as much
// of the queries as there is room for stays in registers, a sixth.
//
// Schedule. A block keeps 64 query rows in shared memory and walks the cache through two buffers that one warp fills by
// TMA, half a tile at a time. The output is 64 x 512 floats, half of all registers, so two warpgroups hold 256 columns
// each. Tile t of a block's run belongs to warpgroup t % 2: that one multiplies it with the queries, turns the scores
// into weights, and publishes the weights (and by what the output so far shrinks) for the other; then both multiply the
// weights with their half of the tile (the exchange of weights between two warpgroups is FlashMLA's).
//
// Of two tiles, in the order in which the tensor cores get them, S scores of a tile, O the output of a half:
//
//     first warpgroup   ... O(1)    S(2)   softmax(2)   O(2)             O(3)   S(4)  softmax(4) ...
//     second warpgroup  ... O(1)           S(3)         O(2) softmax(3)  O(3)         S(5)       ...
//     loads             tile 2 has come    tile 3 has come   tile 4 begins, half by half, when both are done with 2
//
// So the first one's softmax goes on beside the second one's scores, and the second one's beside the output of the
// first one's tile. Where one waits for the other, it is told ahead: of the first one's scores before the last of them,
// and the second one's own matmul stands in line before its weights are published. A buffer is freed by halves, as each
// warpgroup is done with its columns; a tile's halves are filled and multiplied in the order in which they are freed.
// The output shrinks only when a score exceeds the greatest so far by a factor of 2^8. Rows of e4m3 come by a third
// warpgroup that upcasts them (hopper_widen.h).
//
// A block's first query tile and cache rows are asked for before the plan is there, by a guess that is right where all
// requests have all nodes and about the same length. If the plan says otherwise, they are loaded again.
//
// Result. On an H200 8 requests of 8,192 tokens, 64 heads and 17 nodes take 230 us, 676 TFLOP/s; 65 nodes 805 us, 743
// TFLOP/s; over e4m3 359 us and 1,293 us, since refilling a freed half takes longer than by TMA.
//
// What a block holds is in hopper_shared.h, how it is loaded in hopper_load.h, and the arithmetic in hopper_attend.h.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <mutex>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/sm90.h"
#include "ffi/cuda/verify_attn/arithmetic.h"
#include "ffi/cuda/verify_attn/cluster.h"
#include "ffi/cuda/verify_attn/hopper.h"
#include "ffi/cuda/verify_attn/hopper_attend.h"
#include "ffi/cuda/verify_attn/hopper_load.h"
#include "ffi/cuda/verify_attn/hopper_segments.h"
#include "ffi/cuda/verify_attn/hopper_shared.h"
#include "ffi/cuda/verify_attn/hopper_widen.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/cuda/verify_attn/tensor_map.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace hopper {
namespace {

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
      if (!kCluster) list_split_tiles(p, s.run, (thread - kGroupThreads) / 32, kGroupThreads / 32, lane);
      attend_side<1, kCluster, Cache>(p, s, thread - kGroupThreads, out, maximum);
    }
    if (kCluster) {
      // No matmul reads the keys any more: the output is left in their place.
      Left* left = reinterpret_cast<Left*>(s.keys);
      leave_output(p, s.segments[0], left, thread, out, maximum, s.sum);
      combine_cluster<kComputeThreads / 32>(p, s.segments[0], left, thread);
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
}  // namespace hopper

bool hopper_built(int device) {
  const hopper::Card* card = hopper::card_of(device);
  return card != nullptr && card->built;
}

int hopper_cluster(const Problem& p, int device, int sms) {
  if (p.e4m3) return 0;  // there are no such kernels
  return cluster_size(p.batch, shape_tiles(p.nodes, p.heads), ceil_div(p.rows, kHopperStep), sms,
                      hopper::card_of(device)->fits);
}

int attend_hopper(const Problem& p, int blocks, int size, cudaStream_t stream) {
  if (size > 0) blocks = size * p.batch * shape_tiles(p.nodes, p.heads);
  if (p.nodes * p.heads <= kFewRows) return attend_few_hopper(p, blocks, size, stream);
  if (p.e4m3) return hopper::launch<false, uint8_t>(p, blocks, 1, stream);
  return size > 0 ? hopper::launch<true, __nv_bfloat16>(p, blocks, size, stream)
                  : hopper::launch<false, __nv_bfloat16>(p, blocks, 1, stream);
}

}  // namespace ddtree
