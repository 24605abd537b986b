"""tree_build on the GPU against the heap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import reference

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def random_log_probs(rng, batch, depth, k, kind):
    logits = rng.choice([0.3, 3.0, 8.0]) * rng.standard_normal((batch, depth, k)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "zeros":
        return np.zeros_like(logits)
    if kind == "steps":
        return -np.sort(rng.integers(0, 6, logits.shape), axis=-1).astype(np.float32) / 8
    if kind == "sums that round":
        return -np.sort(
            np.ldexp(1 + rng.random(logits.shape), rng.integers(-120, 90, logits.shape))
        ).astype(np.float32)
    if kind == "confident":
        logits[..., : min(k, 12)] += rng.choice([4.0, 9.0]) * rng.random((batch, depth, min(k, 12)))
        logits = np.asarray(jnp.asarray(20 + logits, jnp.bfloat16), np.float32)
    logits = -np.sort(-logits, axis=-1)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True) + 0.5)
    if kind == "minus infinity":
        log_probs[np.arange(k) >= rng.integers(0, k + 1, (batch, depth, 1))] = -np.inf
    return np.minimum(log_probs, 0).astype(np.float32)


def assert_matches_heap(rng, batch, depth, k, budget, keep_spine, kind):
    log_probs = random_log_probs(rng, batch, depth, k, kind)
    token_ids = rng.integers(0, 163840, log_probs.shape, dtype=np.int32)
    roots = rng.integers(0, 163840, batch, dtype=np.int32)
    budgets = rng.integers(-1, budget + 3, batch, dtype=np.int32)
    budgets[0] = budget
    options = dict(budget=budget, budgets=budgets, keep_spine=keep_spine)
    tree = ddtree_jax.tree_build(log_probs, token_ids, roots, **options)
    want = reference.tree_build(log_probs, token_ids, roots, **options)
    for name, value in want.items():
        case = f"{name}: {depth=} {k=} {budget=} {keep_spine=} {kind}"
        np.testing.assert_array_equal(np.asarray(getattr(tree, name)), value, err_msg=case)


@pytest.mark.parametrize(
    "kind", ["plain", "ties", "zeros", "steps", "sums that round", "confident", "minus infinity"]
)
@pytest.mark.parametrize("keep_spine", [False, True])
def test_equals_heap(rng, kind, keep_spine):
    for _ in range(8):
        depth, k = int(rng.integers(1, 32)), int(rng.integers(1, 257))
        assert_matches_heap(rng, 4, depth, k, int(rng.integers(0, 65)), keep_spine, kind)
    for depth, budget in [(1, 0), (1, 1), (7, 6), (7, 7), (7, 16), (7, 64), (15, 128), (31, 256)]:
        assert_matches_heap(rng, 3, depth, max(budget, 1), budget, keep_spine, kind)


def test_batch_of_64(rng):
    assert_matches_heap(rng, 64, 7, 64, 64, True, "ties")


def test_fewer_paths_than_budget(rng):
    assert_matches_heap(rng, 4, 3, 2, 64, False, "plain")


@pytest.mark.parametrize("keep_spine", [False, True])
def test_rows_that_are_not_allowed_count_as_their_running_minimum(rng, keep_spine):
    log_probs = random_log_probs(rng, 8, 7, 64, "plain")
    for value in (np.nan, np.inf, 3.0, -1.0):
        log_probs[rng.random(log_probs.shape) < 0.05] = value
    allowed = np.fmin.accumulate(np.fmin(log_probs, 0), axis=-1)
    token_ids = rng.integers(0, 163840, log_probs.shape, dtype=np.int32)
    roots = rng.integers(0, 163840, 8, dtype=np.int32)
    options = dict(budget=64, keep_spine=keep_spine)
    tree = ddtree_jax.tree_build(log_probs, token_ids, roots, **options)
    want = reference.tree_build(allowed, token_ids, roots, **options)
    for name, value in want.items():
        np.testing.assert_array_equal(np.asarray(getattr(tree, name)), value, err_msg=name)
