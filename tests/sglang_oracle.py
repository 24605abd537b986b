"""SGLang's tree kernels in plain Python, from their semantics: one loop a request, as one GPU thread does it."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tree:
    """A random tree and the tensors that SGLang has of it.

    Attributes:
      parents: [B, N], -1 for the root.
      links: candidates, retrive_index, retrive_next_token, retrive_next_sibling, each i64[B, N].
    """

    parents: np.ndarray
    links: tuple


def random_tree(rng, batch, nodes):
    """Parents before children; few tokens, so that siblings share some."""
    parents = np.full((batch, nodes), -1)
    for i in range(1, nodes):
        parents[:, i] = rng.integers(max(0, i - int(rng.integers(1, 12))), i, batch)
    candidates = rng.integers(0, 6, (batch, nodes))
    built = build_tree(parents, np.full(batch, nodes), np.zeros(batch, np.int64), 1)
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    return Tree(parents, (candidates, *(built[name] for name in names)))


def random_target(rng, tree):
    """Tokens after each row, most of them some child's."""
    candidates = tree.links[0]
    target = rng.integers(0, 6, candidates.shape)
    for b, parents in enumerate(tree.parents):
        for i in rng.permutation(np.arange(1, len(parents))):
            if rng.random() < 0.5:
                target[b, parents[i]] = candidates[b, i]
    return target


def random_results(rng, batch, nodes, width):
    """predicts, accept_index and accept_token_num with whatever they held before."""
    return [
        rng.integers(-9, 9, size, dtype=np.int32) for size in (batch * nodes, (batch, width), batch)
    ]


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, index, next_token, next_sibling, target
):
    """Walks each tree; a match among the siblings in order is accepted, and the last row gets the bonus."""
    target = target.reshape(-1)
    for b in range(len(candidates)):
        last = index[b, 0]
        accept_index[b, 0] = last
        current, accepted = 0, 0
        for _ in range(1, accept_index.shape[1]):
            current = next_token[b, current]
            while current != -1 and candidates[b, current] != target[last]:
                current = next_sibling[b, current]
            if current == -1:
                break
            predicts[last] = target[last]
            accepted += 1
            last = index[b, current]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]


def build_tree(parents, counts, seq_lens, mode):
    """What SGLang's builder leaves in its tensors: linked from the last node down, each put in front.

    Args:
      parents: [B, N].
      counts: [B], nodes in each tree; the others stay unlinked and see only themselves.
      seq_lens: [B].
      mode: 0 a full mask, 1 the tree's columns alone, 2 their bits.
    """
    batch, nodes = parents.shape
    next_token = np.full((batch, nodes), -1, np.int64)
    next_sibling = np.full((batch, nodes), -1, np.int64)
    seen = np.zeros((batch, nodes, nodes), bool)
    depths = np.zeros((batch, nodes), np.int64)
    for b in range(batch):
        for i in range(counts[b] - 1, 0, -1):
            parent = parents[b, i]
            next_sibling[b, i] = next_token[b, parent]
            next_token[b, parent] = i
        for i in range(nodes):
            node = i
            seen[b, i, node] = True
            while i < counts[b] and parents[b, node] >= 0:
                node = parents[b, node]
                seen[b, i, node] = True
                depths[b, i] += 1
    if mode == 0:
        rows = [
            np.concatenate([np.ones((nodes, seq_lens[b]), bool), seen[b]], axis=1).reshape(-1)
            for b in range(batch)
        ]
        mask = np.concatenate(rows)
    elif mode == 1:
        mask = seen.reshape(-1)
    else:
        words = (seen.astype(np.uint64) << np.arange(nodes, dtype=np.uint64)).sum(-1)
        dtype = np.uint8 if nodes <= 8 else np.uint16 if nodes <= 16 else np.uint32
        mask = words.reshape(-1).astype(dtype)
    return {
        "tree_mask": mask,
        "positions": (np.asarray(seq_lens)[:, None] + depths).reshape(-1),
        "retrive_index": np.arange(batch * nodes).reshape(batch, nodes),
        "retrive_next_token": next_token,
        "retrive_next_sibling": next_sibling,
    }
