"""Routed experts and the router against loops in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from routing import CLEAR, margin
from tiny_models import random_target

from ddtree_jax.models import moe

expert_mlp = quick_compile.jit(moe.expert_mlp)
dense_expert_mlp = quick_compile.jit(moe.dense_expert_mlp)
route = quick_compile.jit(lambda router, x: router(x))


def _layer(rng, experts="float", **changes):
    return random_target(rng, num_hidden_layers=2, experts=experts, **changes).layers[1].mlp


def _silu(x):
    return x / (1 + np.exp(-x))


def _by_hand(x, ids, weights, experts):
    out = np.zeros(x.shape)
    for token, chosen in enumerate(ids):
        for j, expert in enumerate(chosen):
            if expert < 0:
                continue
            gate_up, down = (
                np.asarray(w, np.float64) for w in experts.weights(expert, jnp.float32)
            )
            gate, up = np.split(gate_up @ x[token], 2)
            out[token] += weights[token, j] * (down @ (_silu(gate) * up))
    return out


@pytest.mark.parametrize("kind", ["float", "fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_expert_mlp(rng, kind, tokens):
    experts = _layer(rng, kind).experts
    x = rng.normal(0, 1, (tokens, 64)).astype(np.float32)
    ids = np.stack([rng.permutation(6)[:2] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    weights = rng.random(ids.shape).astype(np.float32)
    got = expert_mlp(x, ids, weights, experts)
    want = _by_hand(x, ids, weights, experts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if kind == "float":
        dense = dense_expert_mlp(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), experts)
        np.testing.assert_allclose(dense, want, rtol=1e-4, atol=1e-5)


def test_nobody_chosen_gives_zero(rng):
    experts = _layer(rng).experts
    out = expert_mlp(jnp.ones((3, 64)), jnp.full((3, 2), -1), jnp.ones((3, 2)), experts)
    np.testing.assert_array_equal(out, np.zeros((3, 64)))


def test_an_expert_that_nobody_chose_is_not_read(rng):
    experts = _layer(rng).experts
    poisoned = experts.down[...].at[4].set(jnp.nan)
    experts.down.set_value(poisoned)
    ids = jnp.asarray([[0, 1], [2, 5]])
    assert np.all(np.isfinite(expert_mlp(jnp.ones((2, 64)), ids, jnp.ones((2, 2)), experts)))


@pytest.mark.parametrize("groups, kept, normalise", [(1, 1, True), (3, 2, True), (3, 1, False)])
def test_router(rng, groups, kept, normalise):
    router = _layer(
        rng, n_group=groups, topk_group=kept, norm_topk_prob=normalise, routed_scaling_factor=2.5
    ).gate
    x = rng.normal(0, 1, (40, 64)).astype(np.float32)
    ids, weights = route(router, jnp.asarray(x))
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64))))
    choice = scores + np.asarray(router.e_score_correction_bias[...])
    (clear,) = np.nonzero(margin(choice, router.config) > CLEAR)
    assert len(clear) > 20
    for t in clear:
        size = 6 // groups
        by_group = [np.sort(choice[t, g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
        best = np.argsort(by_group)[-kept:]
        allowed = [e for e in range(6) if e // size in best]
        want = sorted(allowed, key=lambda e: -choice[t, e])[:2]
        assert sorted(np.asarray(ids[t]).tolist()) == sorted(want)
        share = scores[t, np.asarray(ids[t])]
        share = share / share.sum() if normalise else share
        np.testing.assert_allclose(weights[t], 2.5 * share, rtol=1e-5)
