// Routed experts with packed int4 weights.
//
// Four launches. The first sorts the choices by expert into chunks of 8 or 16 tokens of one expert, and lays x out as
// the matmuls want it. The second computes silu(gate) * up of every choice, the third `down` of that, the fourth
// weighs and sums each token's choices in their order, so that a result depends neither on the run nor on the other
// tokens.
//
// bfloat16: a task of the two matmuls is 128 weight rows for one chunk. Blocks are persistent and draw the next task
// when the last stages of theirs are under way, since SMs do not get equal shares of the memory; to a block all
// its tasks are one stream of stages of 256 inputs, copied three deep, so that memory never waits for the end of a
// task. A stage takes 128 bytes of a row and 16 of its scales; the copies of words ask the L2 cache for those of the
// next stage too, since memory is slow at short pieces. Those of scales do not: what they asked for would be gone
// again before its stage. The weights are the 16-row operand of the matrix instruction and the tokens its 8 columns,
// which wastes nothing but arithmetic where an expert has few tokens. The second half of a chunk of 16 is skipped
// where it is empty. An expert with more tokens has several chunks; tasks of the same rows run close together, so that
// all but the first find them in the L2 cache.
//
// Instructions are what there is too few of: at the memory's speed an SM has 60 cycles of each scheduler for 512
// weights. So a warp takes two groups of a stage for 64 rows, which share what depends on the tokens alone.
//
// Unpacking. A group, 32 inputs of a row with one scale, is 16 bytes, and `ldmatrix` gives word t of it, inputs 8 t ..
// 8 t + 7, to lane t of the row's four. Nibbles i and i + 4 of a word become two bfloat16 of 32 + u / 4, u = q + 8:
// those at the bottom of their 16 bits by a mask and an OR; those above them, as they lie, are a bfloat16 of u *
// 2^-129, which one multiplication and addition brings there, on the pipe that has room. So the inputs of a word come
// in the order 0 4 1 5 2 6 3 7, and the other operand lies in memory in that order. The 34 too much is taken off by
// the accumulators' start, -34 times the sum of the group's inputs, which the matrix instruction makes too, once for
// all the rows of a warp. The scale then multiplies the group's sum in float32, and the end of a task makes good for
// the fourth: weights are exact, and the unpacking costs seven instructions for eight of them.
//
// float32: plain arithmetic, a warp for each row and eight tokens.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/ptx.h"
#include "ffi/ddtree.h"

namespace {

using ddtree::ceil_div;
using ddtree::multiply;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kGroup = 32;          // inputs that share a scale
constexpr int kColumns = 8;         // tokens of a matrix instruction
constexpr int kRows = 128;          // weight rows of a task, in two halves: gate and up, or one behind the other
constexpr int kHalf = kRows / 2;
constexpr int kStageGroups = 8;     // of a row in a stage: 128 bytes
constexpr int kStages = 3;
constexpr int kRowBytes = kStageGroups * 16;
constexpr int kTokenBytes = kStageGroups * kGroup * 2;
constexpr int kScaleOffset = kRows * kRowBytes;
constexpr int kTokenOffset = kScaleOffset + kRows * kStageGroups * 2;
constexpr int kMaxExperts = 2048;   // counted in shared memory
constexpr uint32_t kNibbles = 0x000f000fu;
constexpr uint32_t kBias = 0x42004200u;     // two bfloat16 of 32
constexpr uint32_t kOffset = 0xc208c208u;   // of -34
constexpr uint32_t kUpscale = 0x7f007f00u;  // of 2^127
constexpr float kRescale = 4.0f;            // weights come as a fourth of themselves

// Shared memory of a block whose chunks are of 8 * kTiles tokens.
template <int kTiles>
struct Shared {
  static constexpr int kStageBytes = kTokenOffset + kTiles * kColumns * kTokenBytes;
  static constexpr int kExchangeOffset = kStages * kStageBytes;
  static constexpr int kBytes = kExchangeOffset + 4 * 4 * kTiles * 512;  // four warps send all they have
  static_assert(kBytes <= 99 * 1024, "the smallest opt-in limit among sm_80 and later");
};

// The workspace. `chunks` bounds how many there can be: an expert leaves at most one that is not full.
struct Plan {
  int64_t pairs, chunk, chunks, bytes;
  bool countable;  // whether int64 holds `bytes`
  int64_t experts_at, pairs_at, x_at, inner_at, partial_at;
  Plan(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t inner, int32_t dtype) {
    const bool is_float32 = dtype == DDTREE_F32;
    pairs = ddtree::Product({tokens, top_k}).value_or(0);
    chunk = is_float32 || pairs <= 4 * experts ? kColumns : 2 * kColumns;
    chunks = std::min(pairs, std::min(pairs, experts) + pairs / chunk);
    bytes = 0;
    countable = true;
    place({12});  // the number of chunks, and of tasks drawn of either matmul
    experts_at = place({4, chunks});
    pairs_at = place({4, chunks, chunk});
    x_at = place({is_float32 ? 0 : 2, tokens, hidden});
    inner_at = place({is_float32 ? 4 : 2, pairs, inner});
    partial_at = place({4, pairs, hidden});
  }

 private:
  // Where an array of so many bytes lies, all sizes multiplied; the next one starts at a multiple of 256.
  int64_t place(std::initializer_list<int64_t> sizes) {
    const int64_t at = bytes;
    const int64_t blocks = ceil_div(ddtree::Product(sizes).value_or(INT64_MAX), 256);
    const std::optional<int64_t> size = ddtree::Product({blocks, 256});
    countable = countable && size && !__builtin_add_overflow(bytes, *size, &bytes);
    return at;
  }
};

struct Problem {
  const void* x;            // what the caller gave
  const int32_t* ids;       // [pairs]; a pair is a token's choice: token * top_k + j
  const float* shares;      // [pairs]
  const uint8_t* words[2];  // gate_up, down
  const uint8_t* scales[2];
  void* out;
  int32_t* chunks;         // []
  int32_t* drawn;          // [2]: tasks of gate_up and of down, beside each block's first
  int32_t* chunk_experts;  // [chunks]
  int32_t* chunk_pairs;    // [chunks, chunk], -1 where there is none
  __nv_bfloat16* x_laid;   // [T, D], each eight in the order 0 4 1 5 2 6 3 7
  void* inner;             // [pairs, I], of x's dtype; bfloat16 in that order
  float* partial;          // [pairs, D]
  int tokens, top_k, pairs, experts, hidden, inner_size;
};

// Where an input of eight lies among them in the order 0 4 1 5 2 6 3 7.
__device__ __forceinline__ int laid(int input) { return input % 4 * 2 + input / 4; }

// Fills the plan: block 0 of the first launch.
__device__ void sort_pairs(const Problem& p, int chunk) {
  __shared__ int count[kMaxExperts], first[kMaxExperts];
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.pairs; i += blockDim.x) {
    const int e = p.ids[i];
    if (e >= 0 && e < p.experts) atomicAdd(&count[e], 1);
  }
  __syncthreads();
  // Each thread counts the chunks of neighbouring experts; those before them are the sum over the threads before it.
  __shared__ int before_warp[kWarps];
  const int each = (p.experts + kThreads - 1) / kThreads, begin = threadIdx.x * each;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own = 0;
  for (int e = begin; e < min(begin + each, p.experts); ++e) own += (count[e] + chunk - 1) / chunk;
  int end = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, end, d);
    if (lane >= d) end += below;
  }
  if (lane == 31) before_warp[warp] = end;
  __syncthreads();
  for (int w = 0; w < warp; ++w) end += before_warp[w];
  if (threadIdx.x == kThreads - 1) *p.chunks = end, p.drawn[0] = 0, p.drawn[1] = 0;
  int at = end - own;
  for (int e = begin; e < min(begin + each, p.experts); ++e) {
    first[e] = at;
    at += (count[e] + chunk - 1) / chunk;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) {
    const int chunks = (count[e] + chunk - 1) / chunk;
    for (int c = 0; c < chunks; ++c) p.chunk_experts[first[e] + c] = e;
    for (int i = count[e]; i < chunks * chunk; ++i) p.chunk_pairs[first[e] * chunk + i] = -1;
    count[e] = 0;
  }
  __syncthreads();
  // Which of an expert's tokens comes first may differ from run to run; no result depends on it.
  for (int i = threadIdx.x; i < p.pairs; i += blockDim.x) {
    const int e = p.ids[i];
    if (e >= 0 && e < p.experts) p.chunk_pairs[first[e] * chunk + atomicAdd(&count[e], 1)] = i;
  }
}

template <bool kLay>
__global__ void __launch_bounds__(kThreads) prepare(Problem p, int chunk) {
  if (blockIdx.x == 0) {
    sort_pairs(p, chunk);
    return;
  }
  if constexpr (kLay) {
    const int64_t eights = static_cast<int64_t>(p.tokens) * p.hidden / 8;
    const int64_t i = static_cast<int64_t>(blockIdx.x - 1) * kThreads + threadIdx.x;
    if (i >= eights) return;
    const uint4 in = static_cast<const uint4*>(p.x)[i];
    reinterpret_cast<uint4*>(p.x_laid)[i] =
        make_uint4(__byte_perm(in.x, in.z, 0x5410), __byte_perm(in.x, in.z, 0x7632),
                   __byte_perm(in.y, in.w, 0x5410), __byte_perm(in.y, in.w, 0x7632));
  }
}

// One of the two matmuls, as a block sees it: `rows` of an expert in tasks of kRows, `inputs` in stages.
template <bool kGateUp>
struct Matmul {
  int rows, inputs, groups, stages, blocks;
  int jump;  // from a task's first row to that of its second half
  __device__ __forceinline__ explicit Matmul(const Problem& p)
      : rows(kGateUp ? 2 * p.inner_size : p.hidden),
        inputs(kGateUp ? p.hidden : p.inner_size),
        groups(inputs / kGroup),
        stages(max((groups + kStageGroups - 1) / kStageGroups, 3)),  // drawing a task takes three
        blocks(kGateUp ? (p.inner_size + kHalf - 1) / kHalf : (p.hidden + kRows - 1) / kRows),
        jump(kGateUp ? p.inner_size : kHalf) {}
  __device__ __forceinline__ int first_row(int block) const { return block * (kGateUp ? kHalf : kRows); }
  // Rows of the half `half` of the task whose first row is `first`; may be more than kHalf, or below 0.
  __device__ __forceinline__ int count(int first, int half) const {
    return kGateUp ? jump - first : rows - first - half * kHalf;
  }
};

// This thread's index, made anew for each phase from what the compiler cannot see through: addresses that it kept from
// stage to stage would not fit in the registers.
__device__ __forceinline__ uint32_t own_index() {
  uint32_t thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// The last four tasks of the block: its n-th at n % 4.
__device__ __forceinline__ int* drawn_tasks() {
  __shared__ int tasks[4];
  return tasks;
}

// The stream of a block's stages: starts the copies of one after the other. Every thread has its own part of each: four
// chunks of 16 bytes of words, one row's scales in half of the threads, and a chunk of every eighth token.
template <int kTiles, bool kGateUp>
struct Feed {
  const uint8_t* words;
  const uint8_t* scales;
  const uint8_t* x[kTiles];
  int task, stage, draw, tasks_begun;
  bool whole;      // every row of the task is there, and every stage of a row
  uint32_t valid;  // bit q: the row of chunk q is there; bit 4: that of the scales; bit 5 + i: token i

  __device__ __forceinline__ void begin(const Problem& p, const Matmul<kGateUp>& matmul, int tasks) {
    stage = 0;
    valid = 0;
    if (task >= tasks) return;
    const int chunk = task / matmul.blocks, first = matmul.first_row(task % matmul.blocks);
    const int64_t expert = p.chunk_experts[chunk], row = expert * matmul.rows + first;
    const int mine = threadIdx.x / kStageGroups;
    words = p.words[kGateUp ? 0 : 1] + (row + mine) * (matmul.inputs / 2) + threadIdx.x % kStageGroups * 16;
#pragma unroll
    for (int q = 0; q < 4; ++q) valid |= (mine + q % 2 * 32 < matmul.count(first, q / 2)) << q;
    whole = min(matmul.count(first, 0), matmul.count(first, 1)) >= kHalf &&
            matmul.groups == matmul.stages * kStageGroups;
    const int half = threadIdx.x / kHalf, scale_row = threadIdx.x % kHalf;
    scales = p.scales[kGateUp ? 0 : 1] + (row + half * matmul.jump + scale_row) * matmul.groups * 2;
    valid |= (half < 2 && scale_row < matmul.count(first, half)) << 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int pair = p.chunk_pairs[chunk * kTiles * kColumns + i * kColumns + threadIdx.x / 32];
      const int64_t at = max(kGateUp ? pair / p.top_k : pair, 0);
      const void* from = kGateUp ? p.x_laid : p.inner;
      x[i] = static_cast<const uint8_t*>(from) + at * matmul.inputs * 2 + threadIdx.x % 32 * 16;
      valid |= (pair >= 0) << (5 + i);
    }
  }

  // Starts the next stage's copies to `to`, if there is a next stage.
  __device__ __forceinline__ void next(const Problem& p, const Matmul<kGateUp>& matmul, int tasks, uint8_t* to) {
    if (task < tasks) {
      const uint32_t thread = own_index();
      const uint32_t row = thread / kStageGroups, column = thread % kStageGroups;
      const int left = matmul.groups - stage * kStageGroups;
      const uint32_t pitch = matmul.inputs / 2;
      const uint32_t shared = ddtree::shared_address(to);
      const uint32_t word_at = shared + row * kRowBytes + ((column ^ row % 8) << 4);
      const uint8_t* below = words + static_cast<uint64_t>(static_cast<uint32_t>(matmul.jump)) * pitch;
      const uint8_t* from[4] = {words, words + uint64_t{32} * pitch, below, below + uint64_t{32} * pitch};
      const uint32_t token = thread / 32, eight = thread % 32;
      const uint32_t token_at = shared + kTokenOffset + token * kTokenBytes + ((eight ^ token % 2 << 2) << 4);
      if (whole) {
#pragma unroll
        for (int q = 0; q < 4; ++q) ddtree::copy16_of_256(word_at + q * 32 * kRowBytes, from[q]);
        if (thread < kRows) ddtree::copy16(shared + kScaleOffset + thread * kStageGroups * 2, scales);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ddtree::copy16_or_zero(token_at + i * kColumns * kTokenBytes, x[i], (valid >> (5 + i) & 1) != 0);
        }
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const bool there = (valid >> q & 1) != 0 && static_cast<int>(column) < left;
          ddtree::copy16_or_zero(word_at + q * 32 * kRowBytes, from[q], there);
        }
        if (thread < kRows) {  // where a row does not start at a multiple of 16 bytes, or ends before the stage
          const bool there = (valid >> 4 & 1) != 0;
          uint16_t* own = reinterpret_cast<uint16_t*>(to + kScaleOffset + thread * kStageGroups * 2);
          for (int g = 0; g < kStageGroups; ++g) {
            own[g] = there && g < left ? reinterpret_cast<const uint16_t*>(scales)[g] : 0;
          }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const bool there = (valid >> (5 + i) & 1) != 0 && static_cast<int>(eight / 4) < left;
          ddtree::copy16_or_zero(token_at + i * kColumns * kTokenBytes, x[i], there);
        }
      }
      words += kRowBytes;
      scales += kStageGroups * 2;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) x[i] += kTokenBytes;
      ++stage;
      if (stage + 2 >= matmul.stages) {  // one thread draws the next task; the others learn of it after a barrier
        if (stage + 2 == matmul.stages) {
          if (threadIdx.x == 0) draw = atomicAdd(p.drawn + (kGateUp ? 0 : 1), 1) + gridDim.x;
        } else if (stage + 1 == matmul.stages) {
          if (threadIdx.x == 0) drawn_tasks()[(tasks_begun + 1) % 4] = draw;
        } else {
          task = drawn_tasks()[++tasks_begun % 4];
        }
        if (stage == matmul.stages) begin(p, matmul, tasks);
      }
    }
    ddtree::commit_copies();
  }
};

// Nibbles i and i + 4 of a word as bfloat16 of 32 + u / 4.
__device__ __forceinline__ uint32_t unpack(uint32_t word, int i) {
  const uint32_t shifted = i < 2 ? word : word >> 8;
  if (i % 2 == 0) return ddtree::mask_and_set(shifted, kNibbles, kBias);
  return ddtree::multiply_add(shifted & (kNibbles << 4), kUpscale, kBias);
}

// total[i][tile] += what a stage gives a warp: of the stage's groups two, of each half's rows 32, in four times 16.
template <int kTiles>
__device__ __forceinline__ void multiply_stage(const uint8_t* stage, int tiles, float (&total)[4][kTiles][4]) {
  const uint32_t thread = own_index(), lane = thread % 32, rows = thread / 32 % 2 * 32, group = thread / 64 * 2;
  const uint32_t chunk = (group + lane / 16) ^ lane % 8;
  const uint32_t at = ddtree::shared_address(stage) + (rows + lane % 16) * kRowBytes + (chunk << 4);
  const uint8_t* scale_at = stage + kScaleOffset + ((rows + lane / 4) * kStageGroups + group) * 2;
  const uint32_t token = lane / 4;
  const uint8_t* x_at = stage + kTokenOffset + token * kTokenBytes + ((group * 4 + lane % 4) << 4);
  const uint32_t swap = token % 2;
  uint4 x[2][kTiles];
  float start[2][kTiles][4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile > 0 && tile >= tiles) break;
      const uint32_t offset[4] = {kOffset, kOffset, kOffset, kOffset};
      const float zero[4] = {0, 0, 0, 0};
      x[j][tile] = *reinterpret_cast<const uint4*>(x_at + tile * kColumns * kTokenBytes + ((j ^ swap) << 6));
      multiply(start[j][tile], offset, x[j][tile].x, x[j][tile].y, zero);
      multiply(start[j][tile], offset, x[j][tile].z, x[j][tile].w, start[j][tile]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int below = i / 2 * kHalf + i % 2 * 16;
    uint32_t words[4], scales[2];  // of rows lane / 4 and the eighth after it
    ddtree::load_matrices(words, at + below * kRowBytes);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      scales[k] = *reinterpret_cast<const uint32_t*>(scale_at + (below + k * 8) * kStageGroups * 2);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t weights[2][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        weights[k / 2][k % 2 * 2] = unpack(words[j * 2], k);
        weights[k / 2][k % 2 * 2 + 1] = unpack(words[j * 2 + 1], k);
      }
      float scale[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) scale[k] = __uint_as_float(j == 0 ? scales[k] << 16 : scales[k] & 0xffff0000u);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile > 0 && tile >= tiles) break;
        float sum[4];
        multiply(sum, weights[0], x[j][tile].x, x[j][tile].y, start[j][tile]);
        multiply(sum, weights[1], x[j][tile].z, x[j][tile].w, sum);
#pragma unroll
        for (int e = 0; e < 4; ++e) total[i][tile][e] += scale[e / 2] * sum[e];
      }
    }
  }
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

__device__ __forceinline__ void send(float4* to, const float (&from)[4]) {
  *to = make_float4(from[0], from[1], from[2], from[3]);
}
__device__ __forceinline__ void add(float (&to)[4], const float4* from) {
  const float4 other = *from;
  to[0] += other.x, to[1] += other.y, to[2] += other.z, to[3] += other.w;
}

// Ends a task: adds up the four warps that had different inputs of the same rows, and writes. The last two of the four
// send all they have to the first two, which then each send the other half of theirs.
template <int kTiles, bool kGateUp>
__device__ __forceinline__ void finish(const Problem& p, const Matmul<kGateUp>& matmul, int task, uint8_t* exchange,
                                       float (&total)[4][kTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, side = warp / 2 % 2;
  float4* const mine = reinterpret_cast<float4*>(exchange) + warp % 4 * (4 * kTiles * 32) + lane;
  if (warp >= 4) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) send(mine + i * 32, total[i / kTiles][i % kTiles]);
  }
  __syncthreads();
  if (warp < 4) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) add(total[i / kTiles][i % kTiles], mine + i * 32);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      if (side == 0) {
        send(mine + i * 32, total[i / kTiles * 2 + 1][i % kTiles]);
      } else {
        send(mine + i * 32, total[i / kTiles * 2][i % kTiles]);
      }
    }
  }
  const int chunk = task / matmul.blocks, first = matmul.first_row(task % matmul.blocks);
  int pairs[kTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = tile * kColumns + lane % 4 * 2;
    const int2 two = *reinterpret_cast<const int2*>(p.chunk_pairs + chunk * kTiles * kColumns + column);
    pairs[tile][0] = two.x, pairs[tile][1] = two.y;
  }
  __syncthreads();
  if (warp >= 4) return;
  const float4* other = reinterpret_cast<const float4*>(exchange) + (warp ^ 2) * (4 * kTiles * 32) + lane;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float sum[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[half][e] = side == 0 ? total[half * 2][tile][e] : total[half * 2 + 1][tile][e];
      add(sum[half], other + (half * kTiles + tile) * 32);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t pair = pairs[tile][e % 2];
      const int row = warp % 2 * 32 + side * 16 + lane / 4 + e / 2 * 8;
      if (pair < 0) continue;
      if constexpr (kGateUp) {
        if (row >= matmul.count(first, 0)) continue;
        const int input = first + row;
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.inner) + pair * p.inner_size;
        to[input / 8 * 8 + laid(input % 8)] = __float2bfloat16(swiglu(kRescale * sum[0][e], kRescale * sum[1][e]));
      } else {
        float* to = p.partial + pair * p.hidden + first + row;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row < matmul.count(first, half)) to[half * kHalf] = kRescale * sum[half][e];
        }
      }
    }
  }
}

// Two or three blocks to an SM, where its shared memory is not one block's: what one waits for the others hide.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int blocks_of_sm(int) { return 1; }
#else
constexpr int blocks_of_sm(int tiles) { return tiles == 1 ? 3 : 2; }
#endif

template <int kTiles, bool kGateUp>
__global__ void __launch_bounds__(kThreads, blocks_of_sm(kTiles)) multiply_experts(Problem p) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kStageBytes = Shared<kTiles>::kStageBytes;
  const Matmul<kGateUp> matmul(p);
  const int tasks = *p.chunks * matmul.blocks;
  Feed<kTiles, kGateUp> feed;
  feed.tasks_begun = 0;
  feed.task = blockIdx.x;
  feed.begin(p, matmul, tasks);
  for (int i = 0; i < kStages - 1; ++i) feed.next(p, matmul, tasks, shared + i * kStageBytes);
  int slot = 0;
  for (int task = blockIdx.x, done = 0; task < tasks; task = drawn_tasks()[++done % 4]) {
    const int32_t* pairs = p.chunk_pairs + task / matmul.blocks * kTiles * kColumns;
    int tiles = 1;  // a chunk's tokens are its first
    for (int i = 1; i < kTiles; ++i) tiles += pairs[i * kColumns] >= 0;
    float total[4][kTiles][4] = {};
    for (int stage = 0; stage < matmul.stages; ++stage) {
      ddtree::wait_copies<kStages - 2>();
      // The stage is there for all, and the one before it has been read by all: its place is free.
      __syncthreads();
      feed.next(p, matmul, tasks, shared + (slot == 0 ? kStages - 1 : slot - 1) * kStageBytes);
      multiply_stage<kTiles>(shared + slot * kStageBytes, tiles, total);
      slot = slot == kStages - 1 ? 0 : slot + 1;
    }
    finish<kTiles, kGateUp>(p, matmul, task, shared + Shared<kTiles>::kExchangeOffset, total);
  }
}

// Either matmul in float32: a warp takes one row of silu(gate) * up, or of `down`, for a chunk.
template <bool kGateUp>
__global__ void __launch_bounds__(kThreads) multiply_experts_f32(Problem p) {
  const int lane = threadIdx.x % 32;
  const int rows = kGateUp ? p.inner_size : p.hidden, inputs = kGateUp ? p.hidden : p.inner_size;
  const int64_t items = static_cast<int64_t>(*p.chunks) * rows;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < items;
       item += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int chunk = static_cast<int>(item / rows), row = static_cast<int>(item % rows);
    const int32_t* pairs = p.chunk_pairs + chunk * kColumns;
    float total[2][kColumns] = {};
#pragma unroll
    for (int half = 0; half < (kGateUp ? 2 : 1); ++half) {
      const int64_t at = static_cast<int64_t>(p.chunk_experts[chunk]) * (kGateUp ? 2 : 1) * rows + half * rows + row;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(p.words[kGateUp ? 0 : 1]) + at * (inputs / 8);
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(p.scales[kGateUp ? 0 : 1]) + at * (inputs / kGroup);
      for (int w = lane; w < inputs / 8; w += 32) {
        const uint32_t word = words[w];
        const float scale = __uint_as_float(static_cast<uint32_t>(scales[w / 4]) << 16);
        float weights[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) weights[i] = static_cast<float>(static_cast<int>(word >> 4 * i & 15) - 8) * scale;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const int pair = pairs[n];
          if (pair < 0) break;
          const int64_t from = kGateUp ? pair / p.top_k : pair;
          const float* x = static_cast<const float*>(kGateUp ? p.x : p.inner) + from * inputs + 8 * w;
#pragma unroll
          for (int i = 0; i < 8; ++i) total[half][n] += weights[i] * x[i];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int d = 16; d > 0; d /= 2) {
        total[0][n] += __shfl_xor_sync(~0u, total[0][n], d);
        total[1][n] += __shfl_xor_sync(~0u, total[1][n], d);
      }
      const int64_t pair = pairs[n];
      if (lane != 0 || pair < 0) continue;
      if constexpr (kGateUp) {
        const float gate = total[0][n];
        static_cast<float*>(p.inner)[pair * rows + row] = gate / (1.0f + expf(-gate)) * total[1][n];
      } else {
        p.partial[pair * rows + row] = total[0][n];
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) weigh(Problem p) {
  constexpr int kTogether = 8;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i >= static_cast<int64_t>(p.tokens) * p.hidden) return;
  const int64_t token = i / p.hidden, column = i % p.hidden;
  float4 total = make_float4(0, 0, 0, 0);
  for (int begin = 0; begin < p.top_k; begin += kTogether) {
    bool there[kTogether];
    float share[kTogether];
    float4 part[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {  // all are asked for before any is waited for
      const int64_t pair = token * p.top_k + begin + j;
      const int id = begin + j < p.top_k ? p.ids[pair] : -1;
      there[j] = id >= 0 && id < p.experts;  // what lies in the place of one that is not there may be NaN
      share[j] = there[j] ? p.shares[pair] : 0.0f;
      part[j] = there[j] ? *reinterpret_cast<const float4*>(p.partial + pair * p.hidden + column) : total;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (!there[j]) continue;
      total.x += share[j] * part[j].x, total.y += share[j] * part[j].y;
      total.z += share[j] * part[j].z, total.w += share[j] * part[j].w;
    }
  }
  if constexpr (sizeof(T) == 2) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(total.x, total.y), high = __floats2bfloat162_rn(total.z, total.w);
    __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(static_cast<T*>(p.out) + i);
    to[0] = low, to[1] = high;
  } else {
    *reinterpret_cast<float4*>(static_cast<T*>(p.out) + i) = total;
  }
}

template <int kTiles, bool kGateUp>
int launch_matmul(const Problem& p, int64_t chunks, int sms, cudaStream_t stream) {
  const auto kernel = multiply_experts<kTiles, kGateUp>;
  constexpr int kBytes = Shared<kTiles>::kBytes;
  int blocks = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, kBytes) != cudaSuccess || blocks < 1) {
    return ddtree::refused();
  }
  const int64_t tasks = chunks * (kGateUp ? ceil_div(p.inner_size, kHalf) : ceil_div(p.hidden, kRows));
  const int grid = static_cast<int>(std::min<int64_t>(tasks, static_cast<int64_t>(blocks) * sms));
  kernel<<<grid, kThreads, kBytes, stream>>>(p);
  return DDTREE_OK;
}

template <int kTiles>
int launch_matmuls(const Problem& p, int64_t chunks, int sms, cudaStream_t stream) {
  const int status = launch_matmul<kTiles, true>(p, chunks, sms, stream);
  return status != DDTREE_OK ? status : launch_matmul<kTiles, false>(p, chunks, sms, stream);
}

// Whether the kernels serve these sizes: indices of tokens, pairs, tasks and an expert's rows are 32-bit, and so are
// grids.
bool served(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t inner, int32_t dtype) {
  if (ddtree::DtypeBytes(dtype) == 0 || !ddtree::ExpertMlpSizes(tokens, top_k, hidden, inner) ||
      !ddtree::Between(0, experts, kMaxExperts)) {
    return false;
  }
  const int64_t widest = std::max(hidden, 2 * inner);
  if (tokens > INT32_MAX || !ddtree::ProductWithin(INT32_MAX / 64, {tokens, top_k}) || widest > INT32_MAX / 64) {
    return false;
  }
  const Plan plan(tokens, top_k, experts, hidden, inner, dtype);
  return plan.countable && ddtree::ProductWithin(int64_t{INT32_MAX - 1} * kThreads, {tokens, hidden}) &&
         ddtree::ProductWithin(INT32_MAX / 2, {plan.chunks, ceil_div(widest, kRows)});
}

}  // namespace

size_t ddtree_expert_mlp_workspace(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t inner,
                                   int32_t dtype) {
  if (tokens == 0 || hidden == 0 || !served(tokens, top_k, experts, hidden, inner, dtype)) return 0;
  return static_cast<size_t>(Plan(tokens, top_k, experts, hidden, inner, dtype).bytes);
}

int ddtree_expert_mlp_cuda(const ddtree_expert_mlp_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  const int64_t tokens = args->tokens, top_k = args->top_k, experts = args->experts;
  const int64_t hidden = args->hidden, inner = args->inner;
  if (!served(tokens, top_k, experts, hidden, inner, args->dtype) ||
      !ddtree::aligned({args->x, args->gate_up, args->gate_up_scale, args->down, args->down_scale, args->out})) {
    return DDTREE_INVALID_ARGUMENT;
  }
  if (tokens == 0 || hidden == 0) return DDTREE_OK;
  const Plan plan(tokens, top_k, experts, hidden, inner, args->dtype);
  if (!ddtree::has_workspace(args->workspace, args->workspace_bytes, plan.bytes)) return DDTREE_INVALID_ARGUMENT;
  int device = 0, sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return ddtree::refused();
  }
  uint8_t* const workspace = static_cast<uint8_t*>(args->workspace);
  const auto bytes = [](const void* pointer) { return static_cast<const uint8_t*>(pointer); };
  Problem p{};
  p.x = args->x;
  p.ids = args->expert_ids;
  p.shares = args->expert_weights;
  p.words[0] = bytes(args->gate_up);
  p.words[1] = bytes(args->down);
  p.scales[0] = bytes(args->gate_up_scale);
  p.scales[1] = bytes(args->down_scale);
  p.out = args->out;
  p.chunks = reinterpret_cast<int32_t*>(workspace);
  p.drawn = reinterpret_cast<int32_t*>(workspace) + 1;
  p.chunk_experts = reinterpret_cast<int32_t*>(workspace + plan.experts_at);
  p.chunk_pairs = reinterpret_cast<int32_t*>(workspace + plan.pairs_at);
  p.x_laid = reinterpret_cast<__nv_bfloat16*>(workspace + plan.x_at);
  p.inner = workspace + plan.inner_at;
  p.partial = reinterpret_cast<float*>(workspace + plan.partial_at);
  p.tokens = static_cast<int>(tokens);
  p.top_k = static_cast<int>(inner > 0 ? top_k : 0);  // without inner elements every choice gives zeros
  p.pairs = static_cast<int>(plan.pairs);
  p.experts = static_cast<int>(experts);
  p.hidden = static_cast<int>(hidden);
  p.inner_size = static_cast<int>(inner);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool is_float32 = args->dtype == DDTREE_F32;
  const auto blocks_of = [](int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); };
  if (plan.chunks > 0 && inner > 0) {
    const int chunk = static_cast<int>(plan.chunk);
    if (is_float32) {
      prepare<false><<<1, kThreads, 0, cuda_stream>>>(p, chunk);
      const auto grid = [&](int64_t rows) {
        return static_cast<unsigned>(std::min<int64_t>(ceil_div(plan.chunks * rows, kWarps), 8 * sms));
      };
      multiply_experts_f32<true><<<grid(inner), kThreads, 0, cuda_stream>>>(p);
      multiply_experts_f32<false><<<grid(hidden), kThreads, 0, cuda_stream>>>(p);
    } else {
      prepare<true><<<1 + blocks_of(tokens * hidden / 8), kThreads, 0, cuda_stream>>>(p, chunk);
      const auto launch = plan.chunk == kColumns ? launch_matmuls<1> : launch_matmuls<2>;
      const int status = launch(p, plan.chunks, sms, cuda_stream);
      if (status != DDTREE_OK) return status;
    }
  }
  const unsigned grid = blocks_of(tokens * hidden / 4);
  if (is_float32) {
    weigh<float><<<grid, kThreads, 0, cuda_stream>>>(p);
  } else {
    weigh<__nv_bfloat16><<<grid, kThreads, 0, cuda_stream>>>(p);
  }
  return ddtree::launch_status();
}
