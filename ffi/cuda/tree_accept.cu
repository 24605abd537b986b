// The walk along the target's tokens, one block per request: every node looks for the child that its target token
// names, all at once in shared memory; then one thread follows at most L + 1 links.
#include <cuda_runtime.h>

#include "ffi/arguments.h"
#include "ffi/cuda/launch.h"
#include "ffi/ddtree.h"

namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) accept_paths(ddtree_tree_accept_args args) {
  __shared__ int2 link[DDTREE_MAX_NODES];  // token, next sibling
  __shared__ int target[DDTREE_MAX_NODES];
  __shared__ int16_t step[DDTREE_MAX_NODES];  // the child that the target's token names, -1 none
  __shared__ bool stops[DDTREE_MAX_NODES];
  __shared__ int16_t path[DDTREE_MAX_NODES];
  __shared__ int emitted;
  const int64_t request = blockIdx.x, row = request * args.max_nodes;
  const int nodes = static_cast<int>(args.max_nodes), slots = static_cast<int>(args.depth) + 1;
  const int num_nodes = min(args.num_nodes[request], nodes);
  const int max_new = args.max_new[request];
  for (int i = threadIdx.x; i < nodes; i += kThreads) {
    link[i] = make_int2(args.tokens[row + i], args.next_sibling[row + i]);
    target[i] = args.target_tokens[row + i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_nodes; i += kThreads) {
    const int token = target[i];
    int found = -1;
    // Children come after their parent and ascend, so the search ends whatever the arrays hold.
    for (int child = args.next_token[row + i], before = i; child > before && child < num_nodes;) {
      const int2 node = link[child];
      if (node.x == token) {
        found = child;
        break;
      }
      before = child;
      child = node.y;
    }
    step[i] = found;
    bool stop = false;
    for (int64_t j = 0; j < args.num_stops; ++j) stop |= args.stop_tokens[j] == token;
    stops[i] = stop;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int count = 0;
    bool finished = max_new <= 0;
    for (int node = num_nodes > 0 ? 0 : -1; !finished && node >= 0 && count < slots; node = step[node]) {
      if (target[node] < 0) {
        finished = true;
        break;
      }
      path[count++] = node;
      finished = stops[node] || count >= max_new;
    }
    emitted = count;
    args.num_emitted[request] = count;
    args.finished[request] = finished;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    const bool used = i < emitted;
    args.nodes[request * slots + i] = used ? path[i] : -1;
    args.out_tokens[request * slots + i] = used ? target[path[i]] : -1;
  }
}

}  // namespace

int ddtree_tree_accept_cuda(const ddtree_tree_accept_args* args, void* stream) {
  if (const int status = ddtree::Check(args); status != DDTREE_OK) return status;
  // A path is walked kThreads at a time by a 32-bit index.
  if (args->batch > INT32_MAX || args->depth >= INT32_MAX - kThreads) return DDTREE_INVALID_ARGUMENT;
  if (args->batch == 0) return DDTREE_OK;
  accept_paths<<<static_cast<unsigned>(args->batch), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return ddtree::launch_status();
}
