"""draft_topk on the GPU against the NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import reference

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# On Hopper one launch of large clusters, one of small clusters, and two launches; elsewhere two launches.
ROWS_AT_ONCE = [7, 14, 42]


def assert_matches_oracle(logits, k):
    log_probs, token_ids = jax.jit(ddtree_jax.draft_topk, static_argnums=1)(logits, k)
    want_log_probs, want_ids = reference.draft_topk(np.asarray(logits, np.float32), k)
    np.testing.assert_array_equal(np.asarray(token_ids), want_ids)
    np.testing.assert_allclose(np.asarray(log_probs), want_log_probs, rtol=2e-6, atol=2e-5)
    assert np.all(np.asarray(log_probs) <= 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("batch", "k"), [(1, 1), (1, 256), (2, 64), (4, 16), (8, 64), (64, 16)])
def test_kimi_vocabulary(rng, dtype, batch, k):
    depth = 7 if batch < 64 else 2
    logits = 3 * rng.standard_normal((batch, depth, 163840), np.float32)
    assert_matches_oracle(jnp.asarray(logits, dtype), k)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("k", [1, 64, 256])
@pytest.mark.parametrize("rows_at_once", ROWS_AT_ONCE)
def test_rows_made_to_be_hard(rng, dtype, k, rows_at_once):
    vocab = 163840
    steps = np.arange(vocab, dtype=np.float32)
    noise = rng.standard_normal(vocab).astype(np.float32)
    rows = [
        np.full(vocab, 1.25),  # all equal
        steps * 1e-4,  # ascending
        -steps * 1e-4,  # descending
        np.floor(steps / 4096),  # long runs of equals
        np.where(steps % 2 == 0, 0.0, -0.0),  # zeros of both signs
        np.where(rng.random(vocab) < 0.5, np.nan, noise),
        np.where(rng.random(vocab) < 0.999, -np.inf, noise),
        np.full(vocab, -np.inf),
        np.full(vocab, np.nan),
        np.where(rng.random(vocab) < 0.01, np.inf, noise),
        np.where(steps == vocab // 2, 1e30, noise),  # one far above the rest
        np.where(steps > vocab - 5000, 50 + steps * 1e-3, noise),  # the best all together
        # The best groups in the hands of half of the threads, five each.
        np.where(steps // 64 % 512 < 256, 256 - steps // 64 % 512, -1),
        np.where(steps // 64 % 512 < 64, 9 + noise, noise),
    ]
    logits = np.resize(np.stack(rows), (max(len(rows), rows_at_once), vocab))
    for some in np.split(logits, len(logits) // rows_at_once):
        assert_matches_oracle(jnp.asarray(some[None], dtype), k)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vocab", [262144, 262145, 300007])
def test_more_groups_than_threads_keep(rng, dtype, vocab):
    noise = 3 * rng.standard_normal((2, vocab), np.float32)
    last = np.where(np.arange(vocab) < vocab - 9000, noise, 20 + noise)
    logits = np.stack([noise, last, np.round(noise)])
    assert_matches_oracle(jnp.asarray(logits, dtype), 256)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_vocabulary(rng, dtype):
    for _ in range(20):
        vocab = int(rng.integers(1, 3000))
        shape = (int(rng.integers(1, 8)), int(rng.integers(1, 8)), vocab)
        logits = jnp.asarray(np.round(2 * rng.standard_normal(shape), 1), dtype)
        assert_matches_oracle(logits, int(rng.integers(1, min(vocab, 256) + 1)))
