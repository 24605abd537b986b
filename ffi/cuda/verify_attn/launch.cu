// Absorbed MLA attention of a draft tree's nodes over the whole prefix and over their ancestors: the entry point.
//
// Problem. One key/value head of 576 elements per cache row, 512 latent and 64 rotary, serves all heads. So the nodes
// and heads of a request are the rows of one matrix, heads fastest, over the same keys: scores = Q K^T, softmax, output
// = weights times the latent 512. All rows see the whole prefix; the tree's own rows, at most 257, are masked by
// ancestor bits.
//
// Bound. With R = nodes * heads rows per request the work is 2 * R * (576 + 512) flops for each cache row of 1,152
// bytes. An H200's memory is the bound below about 100 rows per request, its tensor cores above.
//
// This file chooses the kernel: float32.h; portable.h for bfloat16 on sm_80 and up; hopper.cu for sm_90a, and
// hopper_few.cu there for up to 32 rows per request. Who does what is planned on the device (plan/plan.h), since
// lengths are device data. Tiles that several blocks share are combined by a second launch (combine.h) or, in clusters,
// within the first (cluster.h).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include <algorithm>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/verify_attn/float32.h"
#include "ffi/cuda/verify_attn/hopper.h"
#include "ffi/cuda/verify_attn/combine.h"
#include "ffi/cuda/verify_attn/plan/plan.h"
#include "ffi/cuda/verify_attn/portable.h"
#include "ffi/cuda/verify_attn/problem.h"
#include "ffi/ddtree.h"

namespace ddtree {
namespace {

constexpr int kMaxBlocks = 256;  // of the persistent grid

int64_t max_steps(int64_t batch, int64_t rows, int64_t nodes, int64_t heads) {
  return batch * ceil_div(nodes * heads, kTileRows) * ceil_div(rows, portable::kStep);
}

int64_t max_blocks(int64_t batch, int64_t rows, int64_t nodes, int64_t heads) {
  return std::min<int64_t>(ceil_div(max_steps(batch, rows, nodes, heads), kMinRun), kMaxBlocks);
}

// Of the workspace, in which the list of cut tiles follows.
size_t splits_bytes(int64_t batch, int64_t rows, int64_t nodes, int64_t heads) {
  return static_cast<size_t>(kBlockSplits * max_blocks(batch, rows, nodes, heads)) * kSplitBytes<float>;
}

// Whether the kernels serve these sizes in some number of layers: what they count in 32 bits must fit.
bool served(int64_t batch, int64_t rows, int64_t nodes, int64_t heads, int32_t dtype) {
  const int64_t bytes = DtypeBytes(dtype);
  return VerifyAttnSizes(rows, nodes, heads) && Between(0, batch, INT32_MAX) &&
         rows <= INT32_MAX - float32::kChunk && ProductWithin(INT32_MAX - kTileRows, {nodes, heads}) &&
         ProductWithin(INT32_MAX, {nodes, heads, batch}) &&
         ArrayBytes(bytes, {batch, rows, DDTREE_ROW_DIM}) &&
         max_steps(batch, rows, nodes, heads) <= kMostSteps - kBeginCost * batch;
}

// The problem of a call whose sizes are served; all but step_rows.
Problem problem_of(const ddtree_verify_attn_args& a) {
  Problem p{};
  p.query = static_cast<const __nv_bfloat16*>(a.query);
  p.cache = a.cache;
  p.ancestors = a.ancestors;
  p.lengths = a.lengths;
  p.num_nodes = a.num_nodes;
  p.layer = a.layer;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.splits = static_cast<uint8_t*>(a.workspace);
  p.split_tiles = reinterpret_cast<SplitTiles*>(p.splits + splits_bytes(a.batch, a.rows, a.nodes, a.heads));
  p.layers = static_cast<int>(a.layers);
  p.batch = static_cast<int>(a.batch);
  p.rows = static_cast<int>(a.rows);
  p.nodes = static_cast<int>(a.nodes);
  p.heads = static_cast<int>(a.heads);
  p.words = (p.nodes + kNodeBits - 1) / kNodeBits;
  p.e4m3 = a.cache_dtype == DDTREE_E4M3;
  p.log2_scale = a.scale * 1.4426950408889634f;
  p.cache_scale = a.cache_scale;
  return p;
}

int attend(const ddtree_verify_attn_args& args, cudaStream_t stream) {
  int device = 0, sms = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return refused();
  }
  const bool has_hopper = major == 9 && minor == 0 && hopper_built(device);
  if (args.path == DDTREE_PATH_HOPPER && !has_hopper) return DDTREE_INVALID_ARGUMENT;
  const int64_t most = max_blocks(args.batch, args.rows, args.nodes, args.heads);
  const int blocks = static_cast<int>(std::min<int64_t>(most, sms));
  Problem problem = problem_of(args);
  if (has_hopper && args.path != DDTREE_PATH_PORTABLE) {
    problem.step_rows = kHopperStep;
    const int size = hopper_cluster(problem, device, sms);
    const int status = attend_hopper(problem, blocks, size, stream);
    if (status != DDTREE_OK || size > 0) return status;
    return launch_combine<__half>(problem, sms, stream);
  }
  problem.step_rows = portable::kStep;
  const int status = attend_portable(problem, blocks, major, stream);
  return status != DDTREE_OK ? status : launch_combine<float>(problem, sms, stream);
}

}  // namespace
}  // namespace ddtree

size_t ddtree_verify_attn_workspace(int64_t batch, int64_t rows, int64_t nodes, int64_t heads, int32_t dtype) {
  using namespace ddtree;  // NOLINT
  if (dtype != DDTREE_BF16 || batch == 0 || !served(batch, rows, nodes, heads, dtype)) return 0;
  // What the end of each block's run cuts, and all tiles where requests are cut into chunks.
  const int64_t tiles = max_blocks(batch, rows, nodes, heads) + batch * ceil_div(nodes * heads, kTileRows);
  return splits_bytes(batch, rows, nodes, heads) + offsetof(SplitTiles, tiles) + tiles * sizeof(SplitTile);
}

int ddtree_verify_attn_cuda(const ddtree_verify_attn_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  // A plane of the cache, a layer's request, is a 32-bit index.
  if (!ddtree::ProductWithin(INT32_MAX, {args->layers, args->batch}) ||
      !ddtree::served(args->batch, args->rows, args->nodes, args->heads, args->dtype) ||
      !ddtree::aligned({args->query, args->cache, args->out})) {
    return DDTREE_INVALID_ARGUMENT;
  }
  if (args->batch == 0) return DDTREE_OK;
  if (args->dtype == DDTREE_F32) return ddtree::attend_float32(*args, static_cast<cudaStream_t>(stream));
  const size_t needed = ddtree_verify_attn_workspace(args->batch, args->rows, args->nodes, args->heads, args->dtype);
  if (!ddtree::has_workspace(args->workspace, args->workspace_bytes, needed)) return DDTREE_INVALID_ARGUMENT;
  return ddtree::attend(*args, static_cast<cudaStream_t>(stream));
}
