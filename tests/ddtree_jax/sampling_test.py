"""The target's token after each node, against NumPy: ties, and rows that are not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import sampling


def _tokens(logits, depths, first_positions, keys, **options):
    return sampling.target_tokens(logits, depths, first_positions, keys, max_depth=7, **options)


# XLA's own options and not the tests' quick ones: some of its kernels lose a NaN.
_jitted = functools.partial(
    jax.jit, static_argnames=("temperature", "top_k", "top_p", "vocab_is_split")
)
target_tokens = _jitted(_tokens)


def _logits(rng, batch, nodes, vocab):
    """Rows of every kind, in a random order."""
    logits = rng.normal(size=(batch, nodes, vocab)).astype(np.float32)
    rows = logits.reshape(-1, vocab)
    for i, row in enumerate(rows):
        spots = rng.choice(vocab, 3, replace=False)
        match i % 12:
            case 0:
                row[spots[:2]] = 50  # the first of two
            case 1:
                row[:] = rng.choice([-1.5, 0.0, 2.0])
            case 2:
                row[0] = 50
            case 3:
                row[-1] = 50
            case 4:
                row[spots[0]] = rng.choice([np.nan, -np.nan])
            case 5:
                row[spots[0]], row[spots[1]] = np.inf, np.nan
            case 6:
                row[spots[:2]] = np.inf
            case 7:
                row[:] = -np.inf
            case 8:
                row[:] = np.nan
            case 9:
                row[np.arange(vocab) != spots[0]] = -np.inf
            case 10:
                row[row < 0] = -np.inf
    rng.shuffle(rows)
    return logits


def _expected(scores, logits):
    tokens = np.full(scores.shape[:-1], -1, np.int32)
    for place in np.ndindex(tokens.shape):
        row = logits[place]
        if not np.isnan(row).any() and np.isfinite(row.max()):
            tokens[place] = np.flatnonzero(scores[place] == scores[place].max())[0]
    return tokens


def _rest(rng, batch, nodes):
    depths = rng.integers(0, 8, (batch, nodes)).astype(np.int32)
    positions = rng.integers(1, 1000, batch).astype(np.int32)
    return depths, positions, sampling.request_keys(7, jnp.arange(batch, dtype=jnp.int32))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("vocab", [5, 67, 512, 4096])
def test_greedy_tokens(rng, vocab, split):
    for batch, nodes in ((1, 1), (1, 17), (3, 12)):
        logits = _logits(rng, batch, nodes, vocab)
        got = target_tokens(logits, *_rest(rng, batch, nodes), vocab_is_split=split)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, _expected(logits, logits))


@pytest.mark.parametrize("vocab", [5, 512, 4096])
@pytest.mark.parametrize("largest", [sampling._largest_by_argmax, sampling._largest_by_reductions])
def test_both_ways_to_the_largest(rng, vocab, largest):
    """Each of them, whatever platform this is."""
    logits = _logits(rng, 2, 24, vocab)
    first, sound = jax.jit(largest)(logits)
    np.testing.assert_array_equal(jnp.where(sound, first, -1), _expected(logits, logits))


def test_greedy_tokens_under_vmap(rng):
    logits = np.stack([_logits(rng, 2, 12, 512) for _ in range(3)])
    rest = _rest(rng, 2, 12)
    got = jax.jit(jax.vmap(lambda x: _tokens(x, *rest)))(logits)
    np.testing.assert_array_equal(got, _expected(logits, logits))


def test_drawn_tokens(rng):
    """The same noise added by NumPy; the ends are as in greedy decoding."""
    logits = _logits(rng, 3, 12, 512)
    depths, positions, keys = _rest(rng, 3, 12)
    got = target_tokens(logits, depths, positions, keys, temperature=0.5)
    noise = sampling.position_noise(keys, positions[:, None] + np.arange(8, dtype=np.int32), 512)
    noise = np.take_along_axis(np.asarray(noise), depths[..., None], axis=1)
    np.testing.assert_array_equal(got, _expected(logits / np.float32(0.5) + noise, logits))
    bounded = target_tokens(logits, depths, positions, keys, temperature=0.5, top_k=1)
    known = np.sum(logits == logits.max(-1, keepdims=True), axis=-1) <= 1
    np.testing.assert_array_equal(bounded[known], _expected(logits, logits)[known])


@pytest.mark.parametrize("split, reads", [(False, 1), (True, 2)])
def test_reads_of_the_logits_on_cuda(rng, split, reads):
    operands = np.zeros((1, 17, 512), np.float32), *_rest(rng, 1, 17)
    traced = target_tokens.trace(*operands, vocab_is_split=split)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.reduce(") == reads
