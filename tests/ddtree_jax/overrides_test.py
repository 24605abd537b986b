"""`temperature` and `max_new` as data: the texts of a config with these values, and no other program."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from markov import follow, random_pair

from ddtree_jax import DecodeConfig, FinishReason, ddtree_decode

decode = quick_compile.jit(ddtree_decode, static_argnames="config")
TOKENS, LENGTHS = np.int32([[5, 3, 7], [2, 9, 0], [11, 0, 0], [4, 4, 1]]), np.int32([3, 2, 1, 3])


def _texts(result):
    ends = np.asarray(result.lengths)
    return [row[:end].tolist() for row, end in zip(np.asarray(result.tokens), ends, strict=True)]


@pytest.mark.parametrize("mode", ["ddtree", "ar"])
def test_texts_are_those_of_a_config_with_these_values(rng, mode):
    target, drafter = random_pair(rng)
    config = DecodeConfig(
        mode=mode, max_new_tokens=24, temperature=1.0, top_p=0.95, seed=int(rng.integers(99))
    )
    temperatures = np.float32([0.7, 1.3, 0.0, 4.0])
    limits = np.int32([24, 0, 7, 13])
    given = dict(temperature=temperatures, max_new=limits)
    got = decode(target, drafter, TOKENS, LENGTHS, config=config, **given)
    assert np.asarray(got.finish_reason).tolist() == [FinishReason.LENGTH] * 4
    assert (np.asarray(got.lengths) - LENGTHS).tolist() == limits.tolist()
    for b in (0, 3):
        own = dataclasses.replace(config, temperature=temperatures[b], max_new_tokens=limits[b])
        one = slice(b, b + 1)
        want = decode(target, drafter, TOKENS[one], LENGTHS[one], config=own)
        assert _texts(want)[0] == _texts(got)[b]
    table = np.asarray(target.table)
    assert _texts(got)[2] == follow(table, TOKENS[2, :1], 7)[0]
    # Rounds later, by the state alone.
    step = dataclasses.replace(config, max_rounds=2)
    part = decode(target, drafter, TOKENS, LENGTHS, config=step, **given)
    while np.any(np.asarray(part.finish_reason) == FinishReason.RUNNING):
        part = decode(target, drafter, TOKENS, LENGTHS, config=step, state=part.state)
    np.testing.assert_array_equal(part.tokens, got.tokens)
    np.testing.assert_array_equal(part.rounds, got.rounds)
    assert np.asarray(part.state.max_new).tolist() == limits.tolist()


def test_one_program_for_all_values(rng):
    target, drafter = random_pair(rng)
    config = DecodeConfig(max_new_tokens=12, temperature=1.0)
    texts, programs = set(), set()
    for temperature, limit in ((0.5, 12), (2.0, 12), (8.0, 5), (1e-6, 3)):
        given = dict(temperature=temperature, max_new=np.full(4, limit, np.int32))
        result = decode(target, drafter, TOKENS, LENGTHS, config=config, **given)
        programs.add(decode._cache_size())
        np.testing.assert_array_equal(np.asarray(result.lengths) - LENGTHS, limit)
        texts.add(str(_texts(result)))
    assert len(programs) == 1 and len(texts) == 4
    for text, prompt, length in zip(_texts(result), TOKENS, LENGTHS, strict=True):
        assert text == follow(np.asarray(target.table), prompt[:length], 3)[0]


def test_what_only_the_running_program_knows_is_a_finish_reason(rng):
    target, drafter = random_pair(rng)
    config = DecodeConfig(max_new_tokens=6, temperature=1.0)
    for given, valid in (
        (dict(temperature=np.float32([np.nan, np.inf, -1, 1])), [3]),
        (dict(max_new=np.int32([7, -1, 6, 2**31 - 1])), [2]),
    ):
        result = decode(target, drafter, TOKENS, LENGTHS, config=config, **given)
        reasons = np.asarray(result.finish_reason)
        for b in range(4):
            good = b in valid
            assert reasons[b] == (FinishReason.LENGTH if good else FinishReason.INVALID)
            assert result.lengths[b] == (LENGTHS[b] + 6 if good else 0)
        sound = {name: np.full_like(value, value[valid[0]]) for name, value in given.items()}
        other = decode(target, drafter, TOKENS, LENGTHS, config=config, **sound)
        assert _texts(other)[valid[0]] == _texts(result)[valid[0]]


def test_what_is_known_is_refused(rng):
    target, drafter = random_pair(rng)
    config = DecodeConfig(max_new_tokens=6, temperature=1.0)
    state = decode(target, drafter, TOKENS, LENGTHS, config=config).state
    for given, message in (
        (dict(temperature=1e39), "temperature must be finite in float32 and at least 0, not inf"),
        (dict(temperature=[1, 1, -2, 1]), "temperature must be finite .* at least 0, not -2.0"),
        (dict(temperature=np.float32("nan")), "temperature must be finite in float32 .* not nan"),
        (
            dict(temperature=jnp.ones(3, jnp.float32)),
            r"temperature must have shape \[4\], not \[3\]",
        ),
        (dict(temperature="hot"), "temperature must be float32, not str"),
        (dict(max_new=[1, 2, 7, 3]), r"each of max_new must lie in 0 \.\. 6, not 7"),
        (dict(max_new=[1, 2, -7, 3]), r"each of max_new must lie in 0 \.\. 6, not -7"),
        (dict(max_new=np.int32([1])), r"max_new must have shape \[4\], not \[1\]"),
        (dict(max_new=[0.5] * 4), "max_new must be int32, not float64"),
        (dict(max_new=[1, 2, 3, 4], state=state), "max_new cannot be given with a state"),
        (dict(temperature=0.5, state=state), "temperature cannot be given with a state"),
    ):
        with pytest.raises(ValueError, match=message):
            ddtree_decode(target, drafter, TOKENS, LENGTHS, config=config, **given)
    greedy = DecodeConfig(max_new_tokens=6)
    with pytest.raises(ValueError, match="temperature is given, but config.temperature is 0"):
        ddtree_decode(target, drafter, TOKENS, LENGTHS, config=greedy, temperature=0.5)
