// Walks each draft tree along the target's tokens.
#include "ffi/ddtree.h"

int ddtree_tree_accept_cpu(const ddtree_tree_accept_args* a, int64_t task, int64_t tasks) {
  if (a->max_nodes < 1 || a->depth < 0 || tasks < 1) return DDTREE_INVALID_ARGUMENT;
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
    int32_t node = a->num_nodes[b] > 0 ? 0 : -1;
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
      int32_t next = child[node];
      // Links of a damaged tree may not be followed for ever: a tree has at most n siblings.
      for (int64_t steps = 0; next >= 0 && next < n && tokens[next] != token && steps < n; ++steps) next = sibling[next];
      node = next >= 0 && next < n && tokens[next] == token ? next : -1;
    }
    a->num_emitted[b] = static_cast<int32_t>(count);
    a->finished[b] = finished;
  }
  return DDTREE_OK;
}
