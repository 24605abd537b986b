"""Packed experts against the float64 oracle, whatever the routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import expert_mlp
from ddtree_jax.experts import _scan_over_experts
from ddtree_jax.reference.expert_mlp import expert_mlp as oracle


def _weights(rng, experts, hidden, inner):
    def packed(rows, inputs):
        words = rng.integers(-(2**31), 2**31, (experts, rows, inputs // 8)).astype(np.int32)
        scales = rng.random((experts, rows, inputs // 32)) * 0.05 - 0.01
        return jnp.asarray(words), jnp.asarray(scales, jnp.bfloat16)

    return *packed(2 * inner, hidden), *packed(hidden, inner)


def _routing(rng, kind, tokens, top_k, experts):
    if kind == "one expert":
        return np.full((tokens, top_k), rng.integers(experts), np.int32)
    if kind == "none":
        return np.full((tokens, top_k), -1, np.int32)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    if kind == "holes":
        ids[rng.random(ids.shape) < 0.4] = -1
        ids[0, 0] = experts  # beyond the last one
    return ids


@pytest.mark.parametrize("kind", ["random", "one expert", "none", "holes"])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_oracle(rng, kind, tokens, dtype):
    experts, hidden, inner, top_k = 5, int(rng.choice([32, 96, 256])), int(rng.choice([32, 64])), 3
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    ids = _routing(rng, kind, tokens, top_k, experts)
    shares = rng.random((tokens, top_k)).astype(np.float32)
    weights = _weights(rng, experts, hidden, inner)
    want = oracle(np.asarray(x, np.float64), ids, shares, *map(np.asarray, weights))
    got = expert_mlp(x, ids, shares, *weights)
    assert got.dtype == dtype
    scale = np.abs(want).max() + 1e-30
    error = np.abs(np.asarray(got, np.float64) - want).max() / scale
    assert error < (2e-6 if dtype == jnp.float32 else 1e-2)
    plain = jax.jit(_scan_over_experts)(x, ids, shares, *weights)[0]
    error = np.abs(np.asarray(plain, np.float64) - want).max() / scale
    assert error < (2e-6 if dtype == jnp.float32 else 3e-2)


@pytest.mark.parametrize("tokens, top_k", [(0, 2), (3, 0)])
def test_nothing_to_do_gives_zeros(rng, tokens, top_k):
    x = rng.normal(size=(tokens, 64)).astype(np.float32)
    ids, shares = np.zeros((tokens, top_k), np.int32), np.zeros((tokens, top_k), np.float32)
    weights = _weights(rng, 3, 64, 32)
    for out in (
        expert_mlp(x, ids, shares, *weights),
        _scan_over_experts(x, ids, shares, *weights)[0],
    ):
        np.testing.assert_array_equal(out, np.zeros((tokens, 64), np.float32))


def test_a_token_does_not_depend_on_the_others(rng):
    weights = _weights(rng, 6, 64, 32)
    x = rng.normal(size=(33, 64)).astype(np.float32)
    ids = _routing(rng, "random", 33, 2, 6)
    shares = rng.random((33, 2)).astype(np.float32)
    together = np.asarray(expert_mlp(x, ids, shares, *weights))
    for t in (0, 16, 32):
        alone = expert_mlp(x[t : t + 1], ids[t : t + 1], shares[t : t + 1], *weights)
        np.testing.assert_array_equal(together[t], alone[0])
    poisoned = x.copy()
    poisoned[5] = np.nan
    others = np.arange(33) != 5
    np.testing.assert_array_equal(
        together[others], np.asarray(expert_mlp(poisoned, ids, shares, *weights))[others]
    )


def test_vmap_jit_and_gpu_lowering(rng):
    weights = _weights(rng, 4, 64, 32)
    x = jnp.asarray(rng.normal(size=(3, 5, 64)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 4, (3, 5, 2)), jnp.int32)
    shares = jnp.asarray(rng.random((3, 5, 2)), jnp.float32)

    def call(x, i, s):
        return expert_mlp(x, i, s, *weights)

    each = jnp.stack([call(*one) for one in zip(x, ids, shares, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(x, ids, shares), each)
    text = (
        jax.jit(call).trace(x[0], ids[0], shares[0]).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert "ddtree_expert_mlp" not in text  # Plain JAX there, so far.


def test_arguments_are_checked(rng):
    weights = _weights(rng, 4, 64, 32)
    x = np.zeros((3, 64), np.float32)
    ids, shares = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="multiples of 32"):
        expert_mlp(
            np.zeros((3, 48), np.float32), ids, shares, *weights[:2], weights[2][:, :48], weights[3]
        )
    with pytest.raises(ValueError, match="expert_ids"):
        expert_mlp(x, ids.astype(np.float32), shares, *weights)
    with pytest.raises(ValueError, match="gate_up"):
        expert_mlp(x, ids, shares, weights[0][:, :-1], *weights[1:])
    with pytest.raises(ValueError, match="down_scale"):
        expert_mlp(x, ids, shares, *weights[:3], weights[3].astype(jnp.float32))
