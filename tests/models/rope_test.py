"""YaRN's numbers for Kimi K2.6, worked out by hand from its config."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.models import rope

K26 = rope.RopeConfig(
    theta=50000.0,
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def test_frequencies_of_k26():
    got = rope.inverse_frequencies(K26, 64)
    plain = 50000.0 ** (-np.arange(32) / 32)
    # Pairs up to 8 keep their frequency, pairs from 20 are slowed 64 times, between them a ramp.
    np.testing.assert_allclose(got[:9], plain[:9], rtol=1e-6)
    np.testing.assert_allclose(got[20:], plain[20:] / 64, rtol=1e-6)
    share = (14 - 8) / 12
    np.testing.assert_allclose(got[14], plain[14] * (share / 64 + 1 - share), rtol=1e-6)


def test_scales_of_k26():
    assert K26.amplitude == 1.0
    assert 192**-0.5 * K26.softmax_factor == pytest.approx(0.1446796, rel=1e-6)


def test_amplitude_rules():
    base = {"theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 64}
    default = 0.1 * math.log(64) + 1
    assert rope.RopeConfig(**base).amplitude == pytest.approx(default)
    assert rope.RopeConfig(**base, attention_factor=1.25).amplitude == 1.25
    assert rope.RopeConfig(theta=1e4).amplitude == 1.0
    assert rope.RopeConfig(theta=1e4).softmax_factor == 1.0


@pytest.mark.parametrize("rotate", [rope.rotate_pairs, rope.rotate_halves])
def test_scores_depend_on_distance_only(rng, rotate):
    query, key = rng.normal(size=(2, 64)).astype(np.float32)

    def score(query, i, j):
        cos, sin = rope.cos_sin(K26, 64, jnp.array([i, j]), jnp.float32)
        return float(rotate(query, cos[0], sin[0]) @ rotate(key, cos[1], sin[1]))

    np.testing.assert_allclose(score(query, 1007, 1000), score(query, 7, 0), rtol=1e-3, atol=2e-3)
    # With itself every pair scores less at a distance, so that the differences cannot cancel.
    assert score(key, 0, 0) - score(key, 7, 0) > 1e-3
