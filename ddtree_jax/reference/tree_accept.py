"""The walk along the target's tokens (DDTree, arXiv 2604.12989, section 3.3)."""

import numpy as np


def tree_accept(
    tokens, parents, num_nodes, target_tokens, *, max_depth, stop_tokens=(), max_new=None
):
    """Follows each tree from its root for as long as a child carries the target's token.

    Args:
      tokens, parents: i32[B, N] of the tree.
      num_nodes: i32[B].
      target_tokens: i32[B, N], the target's token after each node, negative where it has none.
      max_depth: L, the length of the longest path.
      stop_tokens: ids after which nothing more is emitted.
      max_new: i32[B], tokens to emit at most.

    Returns:
      A dict of the fields of `ddtree_jax.AcceptedPath`.
    """
    batch = len(tokens)
    path = {
        "nodes": np.full((batch, max_depth + 1), -1, np.int32),
        "tokens": np.full((batch, max_depth + 1), -1, np.int32),
        "num_emitted": np.zeros(batch, np.int32),
        "finished": np.zeros(batch, bool),
    }
    for b in range(batch):
        limit = np.inf if max_new is None else max_new[b]
        children = {(int(parents[b, i]), int(tokens[b, i])): i for i in range(1, int(num_nodes[b]))}
        node = 0 if num_nodes[b] > 0 else None
        count, finished = 0, limit <= 0
        while node is not None and not finished:
            token = int(target_tokens[b, node])
            if token < 0:
                finished = True
                break
            path["nodes"][b, count] = node
            path["tokens"][b, count] = token
            count += 1
            finished = token in stop_tokens or count >= limit
            node = children.get((node, token))
        path["num_emitted"][b] = count
        path["finished"][b] = finished
    return path
