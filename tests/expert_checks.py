"""Random packed experts and routings, and the check of `expert_mlp` against its oracle, for both devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ddtree_jax import expert_mlp
from ddtree_jax.reference.expert_mlp import expert_mlp as oracle

KINDS = ("random", "one expert", "none", "holes")


def random_weights(rng, experts: int, hidden: int, inner: int):
    """gate_up, gate_up_scale, down, down_scale: every word, and scales of either sign."""

    def packed(rows, inputs):
        words = rng.integers(-(2**31), 2**31, (experts, rows, inputs // 8)).astype(np.int32)
        scales = rng.random((experts, rows, inputs // 32)) * 0.05 - 0.01
        return jnp.asarray(words), jnp.asarray(scales, jnp.bfloat16)

    return *packed(2 * inner, hidden), *packed(hidden, inner)


def random_routing(rng, kind: str, tokens: int, top_k: int, experts: int):
    """Expert ids i32[tokens, top_k]."""
    if kind == "one expert":
        return np.full((tokens, top_k), rng.integers(experts), np.int32)
    if kind == "none":
        return np.full((tokens, top_k), -1, np.int32)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    if kind == "holes":
        ids[rng.random(ids.shape) < 0.4] = -1
        ids[0, 0] = experts  # beyond the last one
    return ids


def random_shares(rng, ids, experts: int):
    """Weights f32[tokens, top_k]; NaN where no expert has the id, which nothing may see."""
    shares = rng.random(ids.shape).astype(np.float32)
    return np.where((ids >= 0) & (ids < experts), shares, np.float32(np.nan))


def error_of(got, want) -> float:
    """The largest difference as a share of the largest wanted number."""
    return np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() + 1e-30)


def check_expert_mlp(
    rng, *, kind, tokens, dtype, top_k=3, experts=5, hidden=64, inner=32, **options
):
    """Compares one random call with the oracle; returns its operands and what was wanted."""
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    ids = random_routing(rng, kind, tokens, top_k, experts)
    shares = random_shares(rng, ids, experts)
    weights = random_weights(rng, experts, hidden, inner)
    want = oracle(np.asarray(x, np.float64), ids, shares, *map(np.asarray, weights))
    got = expert_mlp(x, ids, shares, *weights, **options)
    assert got.dtype == dtype and got.shape == x.shape
    assert error_of(got, want) < (2e-6 if dtype == jnp.float32 else 1e-2)
    return (x, ids, shares, *weights), want
