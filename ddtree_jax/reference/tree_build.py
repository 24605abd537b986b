"""The best-first draft tree (DDTree, arXiv 2604.12989, algorithm 1)."""

import heapq

import numpy as np


def tree_build(log_probs, token_ids, root_tokens, *, budget, budgets=None, keep_spine=False):
    """The `budget` most probable continuations of every request, by the paper's heap.

    Args:
      log_probs: f32[B, L, K], non-increasing in K, at most 0, -inf allowed.
      token_ids: i32[B, L, K].
      root_tokens: i32[B].
      budget: draft nodes; N = budget + 1.
      budgets: i32[B], caps a request below `budget`.
      keep_spine: keep the best candidates' path where the budget is at least L.

    Returns:
      A dict of the fields of `ddtree_jax.DraftTree`, without max_depth.
    """
    batch, _, k = log_probs.shape
    nodes, words = budget + 1, -(-(budget + 1) // 32)
    tree = {
        "tokens": np.zeros((batch, nodes), np.int32),
        "parents": np.full((batch, nodes), -1, np.int32),
        "depths": np.zeros((batch, nodes), np.int32),
        "next_token": np.full((batch, nodes), -1, np.int32),
        "next_sibling": np.full((batch, nodes), -1, np.int32),
        "ancestors": np.zeros((batch, nodes, words), np.uint32),
        "log_probs": np.full((batch, nodes), -np.inf, np.float32),
        "num_nodes": np.zeros(batch, np.int32),
    }
    for b in range(batch):
        room = budget if budgets is None else min(max(int(budgets[b]), 0), budget)
        paths = _select(log_probs[b], k, room, keep_spine)
        index = {path: i for i, path in enumerate(paths)}
        for i, path in enumerate(paths):
            depth = len(path)
            tree["depths"][b, i] = depth
            tree["log_probs"][b, i] = _mass(log_probs[b], path)
            tree["tokens"][b, i] = token_ids[b, depth - 1, path[-1]] if path else root_tokens[b]
            if path:
                tree["parents"][b, i] = index[path[:-1]]
            children = [j for j, other in enumerate(paths) if other and other[:-1] == path]
            for place, child in enumerate(children):
                if place == 0:
                    tree["next_token"][b, i] = child
                else:
                    tree["next_sibling"][b, children[place - 1]] = child
            for length in range(depth + 1):
                _set_bit(tree["ancestors"][b, i], index[path[:length]])
        for i in range(len(paths), nodes):
            _set_bit(tree["ancestors"][b, i], i)
        tree["num_nodes"][b] = len(paths)
    return tree


def _select(log_probs, k, room, keep_spine):
    """The chosen rank paths in order, the root's () first."""
    depth = len(log_probs)
    spine = [(0,) * d for d in range(1, depth + 1)] if keep_spine and room >= depth else []
    order = _best_first(log_probs, k, room)
    others = [path for path in order if path not in spine]
    chosen = spine + others[: room - len(spine)]
    return [(), *sorted(chosen, key=lambda path: (-_mass(log_probs, path), path))]


def _best_first(log_probs, k, count):
    """The first `count` rank paths that the heap pops: mass descending, then ranks ascending."""
    heap = [(-_mass(log_probs, (0,)), (0,))] if count else []
    order = []
    while heap and len(order) < count:
        _, path = heapq.heappop(heap)
        order.append(path)
        grown = []
        if path[-1] + 1 < k:
            grown.append((*path[:-1], path[-1] + 1))
        if len(path) < len(log_probs):
            grown.append((*path, 0))
        for one in grown:
            heapq.heappush(heap, (-_mass(log_probs, one), one))
    return order


def _mass(log_probs, path):
    """The float64 sum of a path's float32 log-probs, from the root down."""
    mass = 0.0
    for position, rank in enumerate(path):
        mass += float(log_probs[position, rank])
    return mass


def _set_bit(words, bit):
    words[bit // 32] |= np.uint32(1 << (bit % 32))
