"""The loop's bookkeeping against a table-driven target whose text three lines of NumPy predict."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hlo import cache_copies
from markov import MarkovDrafter, MarkovTarget, follow, random_pair

from ddtree_jax import CostCurve, DecodeConfig, FinishReason, ddtree_decode

MODES = ("ddtree", "chain", "ar")
decode = quick_compile.jit(ddtree_decode, static_argnames="config")


def _prompts(rng, batch, width, vocab):
    lengths = rng.integers(1, width + 1, batch).astype(np.int32)
    lengths[rng.integers(batch)] = width
    return rng.integers(0, vocab, (batch, width)).astype(np.int32), lengths


def _check(result, table, tokens, lengths, config, max_context=4096):
    # Of a JAX array every slice of another length would be compiled.
    got = np.asarray(result.tokens)
    for b, length in enumerate(lengths):
        want, why = follow(
            table, tokens[b, :length], config.max_new_tokens, config.stop_tokens, max_context
        )
        assert int(result.lengths[b]) == len(want), b
        assert got[b, : len(want)].tolist() == want, b
        assert np.all(got[b, len(want) :] == -1), b
        assert FinishReason(int(result.finish_reason[b])).name.lower() == why, b


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stops", [(), (3,), (0, 7, 11)])
def test_text_and_finish_reason(rng, mode, stops):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 5, 9, target.vocab_size)
    config = DecodeConfig(mode=mode, max_new_tokens=40, stop_tokens=stops, prefill_chunk=4)
    result = decode(target, drafter, tokens, lengths, config=config)
    _check(result, np.asarray(target.table), tokens, lengths, config)
    new = np.asarray(result.lengths) - lengths
    histogram = np.asarray(result.accepted_histogram)
    np.testing.assert_array_equal(histogram.sum(1), result.rounds)
    # The prefill emits the first token, the rounds all others.
    np.testing.assert_array_equal(histogram @ np.arange(histogram.shape[1]), new - 1)


@pytest.mark.parametrize(
    "mode, max_new",
    # Around the seven drafts of a block; plain decoding knows no block.
    [
        *(("ddtree", n) for n in range(10)),
        *(("chain", n) for n in (0, 1, 2, 7, 8, 9)),
        *(("ar", n) for n in (0, 1, 2)),
    ],
)
def test_max_new_tokens_is_never_overshot(rng, mode, max_new):
    target, drafter = random_pair(rng, damage=0.0)
    tokens, lengths = _prompts(rng, 3, 4, target.vocab_size)
    config = DecodeConfig(mode=mode, max_new_tokens=max_new)
    result = decode(target, drafter, tokens, lengths, config=config)
    assert result.tokens.shape == (3, 4 + max_new)
    _check(result, np.asarray(target.table), tokens, lengths, config)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("context", [9, 12, 17])
def test_full_context_is_a_finish_reason(rng, mode, context):
    target, drafter = random_pair(rng, max_context=context)
    tokens, lengths = _prompts(rng, 4, 9, target.vocab_size)
    config = DecodeConfig(mode=mode, max_new_tokens=30, budget=11)
    result = decode(target, drafter, tokens, lengths, config=config)
    _check(result, np.asarray(target.table), tokens, lengths, config, context)


@pytest.mark.parametrize("budget", [0, 1, 6, 7, 8, 64, 256])
def test_budgets(rng, budget):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 3, 6, target.vocab_size)
    config = DecodeConfig(budget=budget, max_new_tokens=33)
    result = decode(target, drafter, tokens, lengths, config=config)
    _check(result, np.asarray(target.table), tokens, lengths, config)


def test_tree_with_spine_takes_no_more_rounds_than_the_chain(rng):
    for _ in range(5):
        target, drafter = random_pair(rng)
        tokens, lengths = _prompts(rng, 1, 5, target.vocab_size)
        rounds = {
            mode: int(
                decode(
                    target,
                    drafter,
                    tokens,
                    lengths,
                    config=DecodeConfig(mode=mode, budget=7, max_new_tokens=50, adaptive=False),
                ).rounds[0]
            )
            for mode in MODES
        }
        assert rounds["ddtree"] <= rounds["chain"] <= rounds["ar"] == 49


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_block_sizes(rng, block_size):
    target, drafter = random_pair(rng, block_size=block_size)
    tokens, lengths = _prompts(rng, 2, 5, target.vocab_size)
    for mode in ("ddtree", "chain"):
        config = DecodeConfig(mode=mode, budget=20, max_new_tokens=37)
        result = decode(target, drafter, tokens, lengths, config=config)
        _check(result, np.asarray(target.table), tokens, lengths, config)


@pytest.mark.parametrize("mode", MODES)
def test_caches_hold_the_committed_text(rng, mode):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 4, 7, target.vocab_size)
    config = DecodeConfig(mode=mode, max_new_tokens=25, budget=19)
    state = decode(target, drafter, tokens, lengths, config=config).state
    state = jax.tree.map(np.asarray, state)
    for b in range(4):
        rows = int(state.lengths[b]) - 1  # The last token's row is written by the round it roots.
        text = state.tokens[b, :rows]
        for layer in range(2):
            got = state.cache[layer, b, :rows, :2] - layer
            np.testing.assert_array_equal(got[:, 0], text)
            np.testing.assert_array_equal(got[:, 1], np.arange(rows))
        if mode != "ar":
            context = state.draft_cache[0][b, :rows]
            np.testing.assert_array_equal(context[:, 0], text)
            np.testing.assert_array_equal(context[:, 1], np.arange(rows))


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_request_disturbs_nobody(rng, mode):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 3, 6, target.vocab_size)
    table = np.asarray(target.table)
    first = follow(table, tokens[1, : lengths[1]], 1)[0][-1]
    config = DecodeConfig(mode=mode, max_new_tokens=30, stop_tokens=(first,))
    result = decode(target, drafter, tokens, lengths, config=config)
    _check(result, table, tokens, lengths, config)
    assert int(result.rounds[1]) == 0
    alone = decode(target, drafter, tokens[:1], lengths[:1], config=config)
    np.testing.assert_array_equal(alone.rounds[0], result.rounds[0])
    np.testing.assert_array_equal(alone.tokens[0], result.tokens[0])


@pytest.mark.parametrize("mode", MODES)
def test_logits_that_are_not_finite_end_their_request_alone(rng, mode):
    target, drafter = random_pair(rng)
    table = np.array(target.table)
    for bad, row in zip((np.nan, np.inf, -np.inf), (2, 5, 8), strict=True):
        table[row] = (
            bad if bad == -np.inf else np.where(np.arange(len(table)) == 4, bad, table[row])
        )
    target = MarkovTarget(jnp.asarray(table))
    tokens, lengths = _prompts(rng, 6, 5, target.vocab_size)
    config = DecodeConfig(mode=mode, max_new_tokens=40)
    result = decode(target, drafter, tokens, lengths, config=config)
    _check(result, table, tokens, lengths, config)


def test_settings_at_the_ends_of_float32(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 2, 4, target.vocab_size)
    for options in (dict(top_p=1e-38), dict(top_p=5e-324), dict(temperature=1e-5, top_p=0.5)):
        options = {"temperature": 1.0, **options}
        config = DecodeConfig(max_new_tokens=9, budget=4, **options)
        result = decode(target, drafter, tokens, lengths, config=config)
        _check(result, np.asarray(target.table), tokens, lengths, config)
    # As hot as can be, the tokens that are there at all are alike, and others never come.
    table = np.zeros((9, 9), np.float32)
    table[:, 5:] = -np.inf
    hot = DecodeConfig(mode="ar", max_new_tokens=200, temperature=float(np.finfo(np.float32).max))
    target = MarkovTarget(jnp.asarray(table))
    result = decode(target, None, np.int32([[1]]), np.int32([1]), config=hot)
    assert FinishReason(int(result.finish_reason[0])) == FinishReason.LENGTH
    # Simulated, 1 in 10^9 right samplers has a count outside.
    counts = np.bincount(np.asarray(result.tokens)[0, 1:], minlength=9)
    assert np.all(counts[5:] == 0) and np.all((counts[:5] > 8) & (counts[:5] < 85)), counts


# A curve under which drafts of this random pair sometimes pay and sometimes do not.
CURVE = CostCurve(nodes=(1, 4, 9), verify=(1.0, 1.1, 1.3), draft=0.5)


@pytest.mark.parametrize(
    "options",
    [*({"mode": mode} for mode in MODES), {"cost_curve": CURVE, "budget": 8}],
    ids=[*MODES, "curve"],
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_going_on_from_a_state_equals_one_call(rng, options, rounds):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 3, 6, target.vocab_size)
    config = DecodeConfig(max_new_tokens=30, stop_tokens=(9,), **options)
    whole = decode(target, drafter, tokens, lengths, config=config)
    step = dataclasses.replace(config, max_rounds=rounds)
    part = decode(target, drafter, tokens, lengths, config=step)
    calls = 1
    while np.any(np.asarray(part.finish_reason) == FinishReason.RUNNING):
        part = decode(target, drafter, tokens, lengths, config=step, state=part.state)
        calls += 1
    assert calls == max(1, -(-int(np.max(whole.rounds)) // rounds))
    for name in ("tokens", "lengths", "rounds", "accepted_histogram", "finish_reason"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name), name)


def test_sampled_text_depends_on_prompt_and_seed_alone(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 4, 6, target.vocab_size)
    options = dict(
        max_new_tokens=30, temperature=0.8, top_k=7, top_p=0.9, seed=int(rng.integers(99))
    )
    texts = {}
    for mode in MODES:
        for budget in (5, 40):
            config = DecodeConfig(mode=mode, budget=budget, **options)
            texts[mode, budget] = decode(target, drafter, tokens, lengths, config=config).tokens
    config = DecodeConfig(**options)
    for text in texts.values():
        np.testing.assert_array_equal(text, texts["ar", 5])
    for b in range(4):
        alone = decode(
            target, drafter, tokens[b : b + 1], lengths[b : b + 1], config=config
        ).tokens[0]
        np.testing.assert_array_equal(alone, texts["ar", 5][b])
    # Hot, since a table may have rows of one probable token, whose text no seed changes.
    hot = DecodeConfig(max_new_tokens=30, temperature=5.0)
    one, other = (
        decode(target, drafter, tokens, lengths, config=hot, seed=jnp.int32(seed)).tokens
        for seed in (1, 12345)
    )
    assert np.any(np.asarray(one) != np.asarray(other))


@pytest.mark.parametrize("mode", ["ddtree", "ar"])
def test_sampled_tokens_follow_the_targets_distribution(rng, mode):
    vocab, draws = 5, 4096
    target, drafter = random_pair(rng, vocab=vocab)
    tokens = np.full((draws, 1), 2, np.int32)
    config = DecodeConfig(mode=mode, budget=9, max_new_tokens=3, temperature=1.3)
    result = decode(
        target,
        drafter,
        tokens,
        np.ones(draws, np.int32),
        config=config,
        request_ids=jnp.arange(draws, dtype=jnp.int32),
        seed=jnp.int32(rng.integers(2**31)),
    )
    text = np.asarray(result.tokens)
    step = np.exp(np.asarray(target.table, np.float64) / 1.3)
    step /= step.sum(1, keepdims=True)
    want = step[2][:, None, None] * step[:, :, None] * step[None]
    got = np.zeros((vocab,) * 3)
    np.add.at(got, tuple(text[:, 1:].T), 1)
    expected = want * draws
    pool = expected < 5
    observed = np.append(got[~pool], got[pool].sum())
    expected = np.append(expected[~pool], expected[pool].sum())
    chi2 = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    freedom = len(observed) - 1
    # Simulated, 1 in 80,000 right samplers is above this with 10 in the place of 30.
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 30, (chi2, freedom)


def test_invalid_prompts_under_jit_are_a_finish_reason(rng):
    target, drafter = random_pair(rng)
    tokens = rng.integers(0, target.vocab_size, (5, 5)).astype(np.int32)
    tokens[3, 2], tokens[4, 0] = target.vocab_size, -1
    tokens[1, 4] = 999  # past the prompt's end: nobody's business
    config = DecodeConfig(max_new_tokens=8)
    result = decode(target, drafter, tokens, np.array([0, 3, 6, 5, 5], np.int32), config=config)
    assert np.asarray(result.finish_reason).tolist() == [
        FinishReason.INVALID,
        FinishReason.LENGTH,
        FinishReason.INVALID,
        FinishReason.INVALID,
        FinishReason.INVALID,
    ]
    want = follow(np.asarray(target.table), tokens[1, :3], 8)[0]
    assert np.asarray(result.tokens[1, :11]).tolist() == want
    assert np.asarray(result.lengths).tolist() == [0, 11, 0, 0, 0]


@pytest.mark.parametrize("mode", ["ar", "chain", "ddtree"])
def test_a_donated_state_becomes_the_next_one_array_by_array(rng, mode):
    """Else XLA for GPUs may mix donated arrays up: https://github.com/jax-ml/jax/issues/39625."""
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 2, 8, target.vocab_size)
    decode = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state")
    run = functools.partial(decode.lower, target, drafter, tokens, lengths)
    config = DecodeConfig(mode=mode, max_new_tokens=40)
    lowered = run(config=config, state=run(config=config).out_info.state)
    text = lowered.as_text(debug_info=True)
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    results = re.findall(r'jax\.result_info = "result\.([^"]*)"', main)
    donated = re.findall(r'tf\.aliasing_output = (\d+) : i32\} loc\("([^"]*)"\)', main)
    assert results == [name for _, name in donated]
    assert [int(at) for at, _ in donated] == list(range(len(results)))
    assert {"state.tokens", "state.lengths", "state.finish_reason", "state.cache"} <= set(results)


def test_loop_has_no_cache_copy_and_shows_the_primitives(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 2, 8, target.vocab_size)
    config = DecodeConfig(max_new_tokens=40)
    state = jax.eval_shape(
        lambda: ddtree_decode(
            target, drafter, jnp.asarray(tokens), jnp.asarray(lengths), config=config
        )
    ).state
    lowered = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state").lower(
        target, drafter, tokens, lengths, config=config, state=state
    )
    text = lowered.compile().as_text()
    assert not cache_copies(text, state.cache, state.draft_cache)
    jaxpr = jax.make_jaxpr(lambda t, n: ddtree_decode(target, drafter, t, n, config=config))(
        jnp.asarray(tokens), jnp.asarray(lengths)
    )
    # The prefill is a while loop too; the decode loop is the one that drafts.
    loops = [str(eqn.params["body_jaxpr"]) for eqn in jaxpr.eqns if eqn.primitive.name == "while"]
    wanted = ("draft_topk", "tree_build", "append_latents", "tree_accept", "commit_path")
    assert any(all(f" {name}" in body for name in wanted) for body in loops), loops


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(mode="beam"), "mode"),
        (dict(budget=-1), "budget"),
        (dict(budget=257), "budget"),
        (dict(budget=1.5), "budget"),
        (dict(max_new_tokens=-1), "max_new_tokens"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=float("nan")), "temperature must be finite in float32"),
        (dict(temperature=float("inf")), "temperature must be finite in float32"),
        (dict(temperature=3.5e38), r"temperature must be finite in float32, at most 3.4e\+38"),
        (dict(adaptive=1), "adaptive must be True or False, not 1"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(top_k=-2), "top_k"),
        (dict(prefill_chunk=0), "prefill_chunk"),
        (dict(prefill_chunk=257), "prefill_chunk"),
        (dict(stop_tokens=("a",)), "stop_tokens"),
        (dict(stop_tokens=3), "stop_tokens must be a tuple of token ids, not 3"),
        (dict(stop_tokens=(-1,)), "each of stop_tokens must lie in 0 .."),
        (dict(temperature="x"), "temperature must be a number, not 'x'"),
        (dict(temperature="0.5"), "temperature must be a number, not '0.5'"),
        (dict(temperature=None), "temperature must be a number, not None"),
        (dict(temperature=[0.5]), r"temperature must be a number, not \[0.5\]"),
        (dict(temperature=10**400), "temperature must be a number"),
        (dict(top_p="x"), "top_p must be a number, not 'x'"),
        (dict(top_p=True), "top_p must be a number, not True"),
        (dict(top_p=np.ones(1)), "top_p must be a number"),
        (dict(budget=True), "budget must be a whole number, not True"),
        (dict(budget=jnp.float32(3)), "budget must be a whole number"),
        (dict(keep_spine="no"), "keep_spine must be True or False, not 'no'"),
        (dict(mode=["ar"]), "mode must be one of"),
        (dict(seed=2**32), "seed must lie in -2147483648 .. 4294967295, not 4294967296"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**options)


def test_config_makes_python_scalars_of_others():
    config = DecodeConfig(
        budget=jnp.int32(3),
        keep_spine=np.bool_(False),
        stop_tokens=np.array([1, 2]),
        temperature=jnp.float32(0.5),
        top_k=np.int64(4),
        top_p=np.float32(0.75),
    )
    plain = DecodeConfig(
        budget=3, keep_spine=False, stop_tokens=(1, 2), temperature=0.5, top_k=4, top_p=0.75
    )
    assert config == plain and hash(config) == hash(plain)
    for field in dataclasses.fields(config):
        assert type(getattr(config, field.name)) is type(getattr(plain, field.name)), field.name


def test_a_traced_option_is_refused():
    with pytest.raises(ValueError, match="temperature must be a number, not a traced array"):
        jax.jit(lambda t: DecodeConfig(temperature=t).temperature)(0.5)


def test_arguments_are_checked(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 2, 5, target.vocab_size)
    config = DecodeConfig(max_new_tokens=4)
    with pytest.raises(ValueError, match="drafter"):
        ddtree_decode(target, None, tokens, lengths, config=config)
    with pytest.raises(ValueError, match="prompt_tokens must be int32, not float32"):
        ddtree_decode(target, drafter, tokens.astype(np.float32), lengths, config=config)
    with pytest.raises(ValueError, match=r"prompt_tokens must have shape \[B, P\], not \[5\]"):
        ddtree_decode(target, drafter, tokens[0], lengths, config=config)
    with pytest.raises(ValueError, match="shape"):
        ddtree_decode(target, drafter, tokens, lengths[:1], config=config)
    with pytest.raises(ValueError, match="empty"):
        ddtree_decode(target, drafter, tokens, np.array([0, 2], np.int32), config=config)
    with pytest.raises(ValueError, match="columns"):
        ddtree_decode(target, drafter, tokens, np.array([2, 6], np.int32), config=config)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        ddtree_decode(target, drafter, tokens + 23, lengths, config=config)
    with pytest.raises(ValueError, match="stop_tokens"):
        ddtree_decode(target, drafter, tokens, lengths, config=DecodeConfig(stop_tokens=(23,)))
    with pytest.raises(TypeError, match="DecodeConfig"):
        ddtree_decode(target, drafter, tokens, lengths, config={"budget": 3})
    with pytest.raises(ValueError, match="prompt_lengths must lie in .*4294967298"):
        ddtree_decode(target, drafter, tokens, np.array([2, 2**32 + 2]), config=config)
    for request_ids, message in (
        (np.arange(3, dtype=np.int32), r"request_ids must have shape \[2\], not \[3\]"),
        (np.zeros(2, np.float32), "request_ids must be int32, not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            ddtree_decode(target, drafter, tokens, lengths, config=config, request_ids=request_ids)
    for seed, message in (
        (2**40, "seed must lie in"),
        ("x", "seed must be a whole number"),
        (jnp.zeros(2, jnp.int32), "seed must be a whole number"),
        (0.5, "seed must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            ddtree_decode(target, drafter, tokens, lengths, config=config, seed=seed)
    for seed in (np.float32(1), np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match="seed must"):
            decode(target, drafter, tokens, lengths, config=config, seed=seed)
    with pytest.raises(ValueError, match="made for a target of vocab_size 9, this one has 23"):

        class Other(MarkovDrafter):
            config = types.SimpleNamespace(vocab_size=9)

        ddtree_decode(target, Other(drafter.table), tokens, lengths, config=config)


def test_states_are_checked(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 2, 5, target.vocab_size)
    config = DecodeConfig(max_new_tokens=4)
    result = decode(target, drafter, tokens, lengths, config=config)
    state = result.state
    with pytest.raises(
        ValueError, match="state must be a DecodeState, not a DecodeResult: pass its"
    ):
        ddtree_decode(target, drafter, tokens, lengths, config=config, state=result)
    with pytest.raises(ValueError, match="state must be a DecodeState, not a dict"):
        ddtree_decode(target, drafter, tokens, lengths, config=config, state={})
    for extra in (dict(seed=3), dict(request_ids=np.arange(2, dtype=np.int32))):
        with pytest.raises(ValueError, match=f"{next(iter(extra))} cannot be given with a state"):
            ddtree_decode(target, drafter, tokens, lengths, config=config, state=state, **extra)
    with pytest.raises(ValueError, match="prompt 1 is not the one"):
        other = lengths.copy()
        other[1] = lengths[1] % 5 + 1
        ddtree_decode(target, drafter, tokens, other, config=config, state=state)
    with pytest.raises(ValueError, match="prompt 0 is not the one"):
        other = tokens.copy()
        other[0, 0] = (tokens[0, 0] + 1) % target.vocab_size
        ddtree_decode(target, drafter, other, lengths, config=config, state=state)
    with pytest.raises(ValueError, match="made with another target"):
        other = dataclasses.replace(state, cache=state.cache.astype(jnp.bfloat16))
        ddtree_decode(target, drafter, tokens, lengths, config=config, state=other)
    with pytest.raises(ValueError, match="made with another drafter"):
        other = dataclasses.replace(state, draft_cache=())
        ddtree_decode(target, drafter, tokens, lengths, config=config, state=other)
    with pytest.raises(ValueError, match="rows"):
        ddtree_decode(
            target,
            drafter,
            tokens,
            lengths,
            state=state,
            config=DecodeConfig(max_new_tokens=4, budget=99),
        )
    with pytest.raises(ValueError, match="state.tokens"):
        ddtree_decode(
            target, drafter, tokens, lengths, state=state, config=DecodeConfig(max_new_tokens=5)
        )


def test_equal_seeds_are_equal_in_every_form(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = _prompts(rng, 2, 5, target.vocab_size)
    config = DecodeConfig(max_new_tokens=12, temperature=1.0, seed=2**32 - 5)
    want = decode(target, drafter, tokens, lengths, config=config).tokens
    for seed in (np.uint32(2**32 - 5), np.int32(-5), -5):
        got = decode(target, drafter, tokens, lengths, config=config, seed=seed).tokens
        np.testing.assert_array_equal(got, want)
    # Outside of jit every operation is compiled by itself, and the plain mode has the fewest.
    config = dataclasses.replace(config, mode="ar")
    eager = ddtree_decode(target, drafter, tokens, lengths, config=config, seed=2**32 - 5).tokens
    np.testing.assert_array_equal(eager, want)
