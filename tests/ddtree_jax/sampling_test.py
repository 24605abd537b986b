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
    with np.errstate(invalid="ignore"):
        scores = (logits - logits.max(-1, keepdims=True)) / np.float32(0.5) + noise
    np.testing.assert_array_equal(got, _expected(scores, logits))
    bounded = target_tokens(logits, depths, positions, keys, temperature=0.5, top_k=1)
    known = np.sum(logits == logits.max(-1, keepdims=True), axis=-1) <= 1
    np.testing.assert_array_equal(bounded[known], _expected(logits, logits)[known])


def test_each_request_has_its_temperature(rng):
    logits = _logits(rng, 4, 12, 512)
    depths, positions, keys = _rest(rng, 4, 12)
    temperatures = np.float32([0.5, 0, 9e-6, 30])
    got = np.asarray(_tokens(logits, depths, positions, keys, temperature=temperatures))
    for b, temperature in enumerate(temperatures):
        one = slice(b, b + 1)
        alone = target_tokens(
            logits[one], depths[one], positions[one], keys[one], temperature=float(temperature)
        )
        np.testing.assert_array_equal(alone[0], got[b])
    np.testing.assert_array_equal(got[1:3], _expected(logits, logits)[1:3])


@pytest.mark.parametrize("top_p", [1e-37, 1.2e-38, 1e-38, 1e-45, 1e-300, 5e-324])
def test_a_share_next_to_nothing_leaves_the_most_probable(rng, top_p):
    logits = np.float32([[1, 5, 2, -np.inf], [3, 3, 0, 1], [-2, -9, -np.inf, -2]])
    kept = np.isfinite(sampling.filter_logits(logits, top_p=top_p))
    want = [[0, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1]]
    np.testing.assert_array_equal(kept, np.array(want, bool))
    kept = np.isfinite(sampling.filter_logits(logits, top_k=2, top_p=top_p))
    np.testing.assert_array_equal(kept, np.array(want, bool))


@pytest.mark.parametrize("top_p", [1 - 1e-9, 1.0])
def test_a_share_that_float32_takes_for_all_keeps_all(rng, top_p):
    logits = np.sort(rng.normal(size=(64, 4096)).astype(np.float32) * 8)
    assert np.all(np.isfinite(sampling.filter_logits(logits, top_p=top_p)))


def test_zeros_of_either_sign_tie():
    logits = np.float32([[-0.0, 0.0, -1]])
    for options in (dict(top_k=1), dict(top_p=0.4)):
        kept = np.isfinite(sampling.filter_logits(logits, **options))
        assert kept.tolist() == [[True, True, False]]


def test_no_sound_logits_overflow(rng):
    """Of any size and at any temperature, what is drawn is what float64 says."""
    largest = np.finfo(np.float32).max
    logits = np.zeros((1, 8, 6), np.float32)
    logits[0, :4] = np.array([1, 0.25, -0.5, -1, -np.inf, 0.9], np.float32) * largest
    logits[0, 4:] = np.float32([1, 2, 3, -np.inf, 2.5, -30])
    depths, positions, keys = _rest(rng, 1, 8)
    noise = sampling.position_noise(keys, positions[:, None] + np.arange(8, dtype=np.int32), 6)
    noise = np.take_along_axis(np.asarray(noise), depths[..., None], axis=1).astype(np.float64)
    for temperature in (0.0, 1e-45, 1e-38, 9e-6, 1e-5, 1.0, 1e30, 1e38, float(largest)):
        got = target_tokens(logits, depths, positions, keys, temperature=temperature)
        scores = logits.astype(np.float64)
        if temperature >= 1e-5:
            scores = scores / temperature + noise
        np.testing.assert_array_equal(got, scores.argmax(-1), str(temperature))


@pytest.mark.parametrize("split, reads", [(False, 1), (True, 2)])
def test_reads_of_the_logits_on_cuda(rng, split, reads):
    operands = np.zeros((1, 17, 512), np.float32), *_rest(rng, 1, 17)
    traced = target_tokens.trace(*operands, vocab_is_split=split)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.reduce(") == reads
