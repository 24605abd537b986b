"""A draft tree as text."""

from __future__ import annotations

import numpy as np
from rich.text import Text
from rich.tree import Tree


def picture(tree, path, decode, request: int = 0):
    """The tree of one request for `rich` to print.

    Each node shows its text, its probability given its parent, and its place in the order in which the
    tree grew; "*" marks the accepted path.

    Args:
      tree: a `DraftTree`.
      path: the `AcceptedPath` that the target made of it.
      decode: a list of token ids to text.
      request: whose tree to show.

    Returns:
      A `rich.tree.Tree`.
    """
    count = int(tree.num_nodes[request])
    tokens, parents = (np.asarray(x[request]).tolist() for x in (tree.tokens, tree.parents))
    log_probs = np.asarray(tree.log_probs[request], np.float64)
    accepted = set(np.asarray(path.nodes[request]).tolist())
    branches = []
    for node in range(count):
        on_path = node in accepted
        label = Text("* " if on_path else "", style="bold green" if on_path else "")
        label.append(repr(decode([tokens[node]])))
        if node == 0:
            branches.append(Tree(label))
            continue
        # A parent that cannot happen leaves nothing to condition on.
        share = log_probs[node] - log_probs[parents[node]]
        label.append(f"  {np.exp(share):.1%}  #{node}" if np.isfinite(share) else f"  #{node}")
        branches.append(branches[parents[node]].add(label))
    return branches[0]
