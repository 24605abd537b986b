"""tree_accept on the GPU against the NumPy oracle."""

import jax
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import reference

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def random_trees(rng, batch, depth, k, budget):
    log_probs = -np.sort(rng.exponential(2.0, (batch, depth, k)), axis=-1).astype(np.float32)
    token_ids = np.broadcast_to(rng.permutation(k).astype(np.int32), (batch, depth, k))
    roots = rng.integers(0, k, batch, dtype=np.int32)
    budgets = rng.integers(0, budget + 1, batch, dtype=np.int32)
    return ddtree_jax.tree_build(log_probs, token_ids, roots, budget=budget, budgets=budgets)


@pytest.mark.parametrize(("batch", "budget"), [(1, 16), (8, 64), (64, 64), (8, 256)])
@pytest.mark.parametrize("stops", [0, 2])
def test_equals_oracle(rng, batch, budget, stops):
    depth, k = 7, 12
    tree = random_trees(rng, batch, depth, k, budget)
    parents, tokens = np.asarray(tree.parents), np.asarray(tree.tokens)
    target = rng.integers(-1, k, tokens.shape, dtype=np.int32)
    for b, node in zip(*np.nonzero(parents >= 0), strict=True):
        if rng.random() < 0.7:  # follow this child, or a later one that overwrites it
            target[b, parents[b, node]] = tokens[b, node]
    stop_tokens = tuple(int(t) for t in rng.integers(0, k, stops))
    max_new = rng.integers(-1, 2 * depth, batch, dtype=np.int32)
    path = ddtree_jax.tree_accept(tree, target, stop_tokens=stop_tokens, max_new=max_new)
    want = reference.tree_accept(
        tokens,
        parents,
        np.asarray(tree.num_nodes),
        target,
        max_depth=depth,
        stop_tokens=stop_tokens,
        max_new=max_new,
    )
    for name, value in want.items():
        np.testing.assert_array_equal(np.asarray(getattr(path, name)), value, err_msg=name)
