"""Drafts that gain nothing become rare, others do not, and the text is the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hlo import cache_copies
from markov import MarkovDrafter, counting, follow, random_pair, wrong_drafter

from ddtree_jax import CostCurve, DecodeConfig, ddtree_decode
from ddtree_jax.pause import Pause

decode = quick_compile.jit(ddtree_decode, static_argnames="config")
CURVE = CostCurve((1, 8, 20), (1.0, 1.5, 2.0), None, 0.3)
KINDS = ({"mode": "chain"}, {"budget": 6}, {"budget": 19, "cost_curve": CURVE})


def _replayed(accepted, rounds, needed, promising=True):
    """The rounds with a draft, if a draft in round r has accepted(r) nodes accepted. A second telling of the rule."""
    mean, period, due, drafts = 0.5, 1, 0, []
    for turn in range(rounds):
        if turn < due:
            continue
        drafts.append(turn)
        gain = accepted(turn) - needed
        mean += (gain - mean) / 16
        if gain >= needed:
            mean = max(mean, 0.5)
        if promising and mean >= 0:
            period, due = 1, turn + 1
        elif promising and gain >= 0:
            due = turn + 1
        else:
            period = min(2 * period, 16)
            due = next(later for later in range(turn + 1, turn + 99) if later % period == 0)
    return drafts


def _paused(accepted, rounds, needed, promising=True):
    pause, drafts = Pause.none(1), []
    after = jax.jit(lambda pause, *arguments: pause.after(*arguments))
    for turn in range(rounds):
        wants = turn >= np.asarray(pause.next_draft)
        if wants[0]:
            drafts.append(turn)
        number = np.int32([accepted(turn) if wants[0] else 0])
        pause = after(pause, np.int32([turn]), wants, number, np.float32(needed), promising)
    return drafts


def test_when_a_request_drafts(rng):
    # Eight drafts that gain nothing, then in rounds that all requests share, so that few of a batch's are delayed.
    want = [*range(8), 8, 12, 16, 32, 48, 64, 80, 96]
    assert _paused(lambda turn: 0, 100, 0.75) == _replayed(lambda turn: 0, 100, 0.75) == want
    # A draft that was not promising is paused after at once.
    want = [0, 2, 4, 8, 16, 32]
    assert _paused(lambda turn: 0, 40, 0.75, False) == want
    assert _replayed(lambda turn: 0, 40, 0.75, False) == want
    # One accepted draft is followed by another, two by many.
    one = _paused(lambda turn: int(turn == 32), 70, 0.75)
    assert [turn for turn in one if turn > 16] == [32, 33, 48, 64]
    two = _paused(lambda turn: 2 * (turn == 32), 70, 0.75)
    assert [turn for turn in two if turn > 16][:9] == list(range(32, 41))
    # What is accepted in every round is never paused.
    assert _paused(lambda turn: 1, 60, 0.75) == list(range(60))
    for needed in (0.25, 0.75, 3.5):
        accepted = rng.choice([0, 0, 0, 1, 2, 5], 200)
        got = _paused(lambda turn, a=accepted: int(a[turn]), 200, needed)
        assert got == _replayed(lambda turn, a=accepted: int(a[turn]), 200, needed)


@pytest.mark.parametrize("options", KINDS, ids=["chain", "ddtree", "curve"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_always_wrong_drafts_in_one_round_of_sixteen(rng, options, temperature):
    target, _ = random_pair(rng)
    calls = []
    drafter = counting(wrong_drafter(target), calls)
    tokens = rng.integers(0, target.vocab_size, (3, 4)).astype(np.int32)
    lengths = np.int32([4, 2, 3])
    config = DecodeConfig(max_new_tokens=161, temperature=temperature, **options)
    result = decode(target, drafter, tokens, lengths, config=config)
    jax.effects_barrier()
    plain = dataclasses.replace(config, mode="ar", cost_curve=None)
    want = decode(target, None, tokens, lengths, config=plain)
    np.testing.assert_array_equal(result.tokens, want.tokens)
    if temperature == 0:
        for got, row, length in zip(np.asarray(result.tokens), tokens, lengths, strict=True):
            text = follow(np.asarray(target.table), row[:length], 161)[0]
            assert got[: len(text)].tolist() == text
    assert np.asarray(want.undrafted_rounds).tolist() == [160] * 3
    drafted = np.asarray(result.rounds) - np.asarray(result.undrafted_rounds)
    histogram = np.asarray(result.accepted_histogram)
    np.testing.assert_array_equal(histogram.sum(1), result.rounds)
    new = np.asarray(result.lengths) - lengths - 1
    np.testing.assert_array_equal(histogram @ np.arange(histogram.shape[1]), new)
    if temperature == 0:
        assert np.asarray(result.rounds).tolist() == [160] * 3
        # The eight at first, and rounds 8, 12, 16, 32, ... 144; all requests at once.
        if config.cost_curve is None:
            assert drafted.tolist() == [8 + 11] * 3 and len(calls) == 8 + 11
        else:  # Larger trees cost more than smaller ones, so that fewer of them decide.
            assert np.all((drafted >= 11) & (drafted <= 8 + 11)) and len(calls) <= 8 + 11
    else:
        # A draw may be what the drafter said, now and then.
        assert np.all(drafted < 0.4 * np.asarray(result.rounds)), drafted


@pytest.mark.parametrize("options", KINDS[:2], ids=["chain", "ddtree"])
def test_each_request_pauses_for_itself(rng, options):
    """Two texts that never meet: of one every draft is right, of the other none."""
    size = 16
    table = np.full((2 * size, 2 * size), -9, np.float32)
    after = np.concatenate([(np.arange(size) + 1) % size, (np.arange(size) + 1) % size + size])
    table[np.arange(2 * size), after] = 9
    drafts = table.copy()
    drafts[size:] = -np.roll(table[size:], 1, axis=1)
    target = random_pair(rng)[0].__class__(jnp.asarray(table))
    drafter = MarkovDrafter(jnp.asarray(drafts))
    tokens = np.int32([[3], [size + 3], [5]])
    config = DecodeConfig(max_new_tokens=97, **options)
    together = decode(target, drafter, tokens, np.ones(3, np.int32), config=config)
    for b in range(3):
        alone = decode(target, drafter, tokens[b : b + 1], np.ones(1, np.int32), config=config)
        for name in ("tokens", "rounds", "undrafted_rounds", "accepted_histogram"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[b])
        assert np.asarray(together.tokens)[b].tolist() == follow(table, tokens[b], 97)[0]
    rounds, undrafted = np.asarray(together.rounds), np.asarray(together.undrafted_rounds)
    assert rounds[1] == 96 and undrafted.tolist() == [0, 96 - 15, 0]
    depth = 7 if "mode" in options else 6  # drafts of a chain, and of six nodes
    assert rounds[0] == rounds[2] == -(-96 // (depth + 1))


def test_without_the_rule_every_round_drafts(rng):
    target, _ = random_pair(rng)
    calls = []
    drafter = counting(wrong_drafter(target), calls)
    config = DecodeConfig(max_new_tokens=41, adaptive=False, cost_curve=CURVE, budget=19)
    result = decode(target, drafter, np.int32([[1, 2]]), np.int32([2]), config=config)
    jax.effects_barrier()
    assert result.rounds.tolist() == [40] and len(calls) == 40
    assert result.undrafted_rounds.tolist() == [0]


def test_a_round_without_a_draft_is_a_step_of_plain_decoding(rng):
    """Its pass has one node, its draws are of one position, and no cache is copied for it."""
    target, drafter = random_pair(rng, vocab=37)
    tokens, lengths = np.zeros((2, 5), np.int32), np.int32([5, 4])
    config = DecodeConfig(max_new_tokens=20, budget=12, temperature=1.0)
    first = dataclasses.replace(config, max_rounds=0)
    state = jax.eval_shape(
        lambda: ddtree_decode(target, drafter, tokens, lengths, config=first)
    ).state
    lower = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state").lower
    lowered = lower(target, drafter, tokens, lengths, config=config, state=state)
    assert not cache_copies(lowered.compile().as_text(), state.cache, state.draft_cache)
    plain = dataclasses.replace(config, mode="ar")
    held = dataclasses.replace(state, draft_cache=None)
    step = str(
        jax.make_jaxpr(
            lambda s: ddtree_decode(
                target,
                None,
                tokens,
                lengths,
                config=plain,
                state=dataclasses.replace(s, accepted_histogram=s.accepted_histogram[:, :2]),
            )
        )(held)
    )
    both = str(
        jax.make_jaxpr(
            lambda s: ddtree_decode(target, drafter, tokens, lengths, config=config, state=s)
        )(state)
    )
    for shape in ("f32[2,1,37]", "f32[2,1,576]"):
        assert shape in step and shape in both
    # The noise of one position, and of all that a path may hold.
    noise = "random_bits[bit_width=32 shape=(37,)]"
    assert step.count(noise) == 1 and both.count(noise) == 2
