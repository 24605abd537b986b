// Walks each draft tree along the target's tokens.
#include <algorithm>

#include "ffi/arguments.h"
#include "ffi/cpu/no_cuda.h"
#include "ffi/ddtree.h"

int ddtree_tree_accept_cpu(const ddtree_tree_accept_args* a, int64_t task, int64_t tasks) {
  if (const int status = ddtree::Check(a, task, tasks); status != DDTREE_OK) return status;
  const int64_t n = a->max_nodes, path = a->depth + 1;
  for (int64_t b = task; b < a->batch; b += tasks) {
    const int32_t* tokens = a->tokens + b * n;
    const int32_t* child = a->next_token + b * n;
    const int32_t* sibling = a->next_sibling + b * n;
    const int32_t* target = a->target_tokens + b * n;
    int32_t* nodes = a->nodes + b * path;
    int32_t* emitted = a->out_tokens + b * path;
    for (int64_t j = 0; j < path; ++j) nodes[j] = emitted[j] = -1;
    int64_t count = 0;
    const int64_t num_nodes = std::min<int64_t>(a->num_nodes[b], n);
    int32_t node = num_nodes > 0 ? 0 : -1;
    bool finished = a->max_new[b] <= 0;
    while (node >= 0 && !finished && count < path) {
      const int32_t token = target[node];
      if (token < 0) {
        finished = true;
        break;
      }
      nodes[count] = node;
      emitted[count++] = token;
      for (int64_t s = 0; s < a->num_stops; ++s) finished |= a->stop_tokens[s] == token;
      finished |= count >= a->max_new[b];
      // Children come after their parent and ascend, so the search ends whatever the arrays hold.
      int32_t before = node;
      int32_t next = child[node];
      while (next > before && next < num_nodes && tokens[next] != token) {
        before = next;
        next = sibling[next];
      }
      node = next > before && next < num_nodes ? next : -1;
    }
    a->num_emitted[b] = static_cast<int32_t>(count);
    a->finished[b] = finished;
  }
  return DDTREE_OK;
}

DDTREE_NO_CUDA_KERNEL(tree_accept)
