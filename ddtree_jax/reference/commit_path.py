"""Moving the accepted nodes' rows up behind the prefix (DDTree, arXiv 2604.12989, section 3.3)."""

import numpy as np


def commit_path(cache, nodes, num_emitted, lengths):
    """A copy of `cache` [layers, B, S, width] with row lengths[b] + nodes[b, j] at row lengths[b] + j.

    For j < num_emitted[b], in every layer; `nodes` is i32[B, L + 1], the others i32[B]. Every source is
    read before anything is written. A negative node, or a row outside the cache, moves nothing.
    """
    before, cache = np.array(cache), np.array(cache)
    rows = cache.shape[2]
    for b in range(cache.shape[1]):
        for j in range(min(int(num_emitted[b]), nodes.shape[1])):
            source, place = int(lengths[b]) + int(nodes[b, j]), int(lengths[b]) + j
            if nodes[b, j] >= 0 and 0 <= source < rows and 0 <= place < rows:
                cache[:, b, place] = before[:, b, source]
    return cache
