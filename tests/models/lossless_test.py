"""Random targets and drafters in float32: the three modes emit the same tokens, ties counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hlo import cache_copies
from text_checks import continuations, ties
from tiny_models import random_drafter, random_target

from ddtree_jax import CostCurve, DecodeConfig, FinishReason, ddtree_decode
from ddtree_jax.decode import draft_tree

decode = jax.jit(ddtree_decode, static_argnames="config")
quick_decode = quick_compile.jit(ddtree_decode, static_argnames="config")
draft = jax.jit(draft_tree, static_argnames="config")
_NEW = 24
# Few tokens, so that a drafter that knows nothing is right now and then.
_SMALL = {"vocab_size": 12, "eos_token_id": 3}
_MASK = {"vocab_size": 12, "dflash_config": {"mask_token_id": 11, "target_layer_ids": [2, 0]}}


def _prompts(rng, batch, width, vocab):
    lengths = rng.integers(1, width + 1, batch).astype(np.int32)
    return rng.integers(0, vocab, (batch, width)).astype(np.int32), lengths


def test_two_hundred_ragged_prompts_in_three_modes(rng):
    parted = accepted = rounds = 0
    for _ in range(5):
        target, drafter = random_target(rng, **_SMALL), random_drafter(rng, **_MASK)
        # Both as users compile it and with operations that are not fused.
        for stops, decode_once in (((), decode), ((5,), quick_decode)):
            tokens, lengths = _prompts(rng, 20, 64, 12)
            texts = {}
            for mode in ("ar", "chain", "ddtree"):
                config = DecodeConfig(
                    mode=mode, budget=16, max_new_tokens=_NEW, stop_tokens=stops, prefill_chunk=32
                )
                result = decode_once(target, drafter, tokens, lengths, config=config)
                texts[mode] = continuations(result, lengths)
                if mode == "ddtree":
                    histogram = np.asarray(result.accepted_histogram).sum(0)
                    accepted += histogram @ np.arange(len(histogram))
                    rounds += histogram.sum()
            for mode in ("chain", "ddtree"):
                parted += ties(target, tokens, lengths, texts["ar"], texts[mode])
    print("ties", parted, "accepted a round", accepted / rounds)
    assert parted <= 4
    assert accepted / rounds > 1.15  # Else drafts were never accepted and nothing was tested.


def test_a_cost_curve_changes_the_rounds_and_not_the_text(rng):
    """Passes of three sizes; nodes that differ between rounds and requests."""
    # A node costs about what one of middling probability promises.
    idle = np.asarray([1.0, 1.02, 1.05])
    sizes = (1, 6, 17)
    verify = idle + rng.uniform(0.02, 0.06) * (np.asarray(sizes) - 1)
    curve = CostCurve(sizes, tuple(verify), tuple(idle), 0.05)
    options = dict(max_new_tokens=_NEW, prefill_chunk=32)
    plain = DecodeConfig(mode="ar", **options)
    spine = bool(rng.integers(2))
    start = DecodeConfig(cost_curve=curve, keep_spine=spine, max_rounds=0, **options)
    step = dataclasses.replace(start, max_rounds=1)
    parted, nodes = 0, set()
    for _ in range(3):
        target, drafter = random_target(rng, **_SMALL), random_drafter(rng, **_MASK)
        tokens, lengths = _prompts(rng, 4, 32, 12)
        result = decode(target, drafter, tokens, lengths, config=start)
        while np.any(np.asarray(result.finish_reason) == FinishReason.RUNNING):
            state = result.state
            if not int(state.pause.left):
                nodes |= set(
                    np.asarray(draft(target, drafter, state, config=step).num_nodes).tolist()
                )
            result = decode(target, drafter, tokens, lengths, config=step, state=state)
        wanted = continuations(decode(target, drafter, tokens, lengths, config=plain), lengths)
        parted += ties(target, tokens, lengths, wanted, continuations(result, lengths))
    print("spine", spine, "ties", parted, "nodes", nodes)
    assert parted <= 2 and len(nodes - {0}) > 3


def test_ragged_prompts_in_three_modes_over_an_e4m3_cache(rng):
    """Every mode reads rows that were rounded before anything attended to them, so that all see the same context."""
    scale = tuple(rng.uniform(0.1, 2, 3))
    target = random_target(rng, cache_dtype="float8_e4m3fn", cache_scale=scale, **_SMALL)
    drafter = random_drafter(rng, **_MASK)
    tokens, lengths = _prompts(rng, 20, 64, 12)
    texts = {}
    for mode in ("ar", "chain", "ddtree"):
        config = DecodeConfig(mode=mode, budget=16, max_new_tokens=_NEW, prefill_chunk=32)
        result = decode(target, drafter, tokens, lengths, config=config)
        assert result.state.cache.dtype == jnp.float8_e4m3fn
        texts[mode] = continuations(result, lengths)
    parted = [
        ties(target, tokens, lengths, texts["ar"], texts[mode]) for mode in ("chain", "ddtree")
    ]
    print("ties", parted)
    assert sum(parted) <= 4


def test_sampled_text_is_the_same_in_every_mode_budget_and_batch(rng):
    target, drafter = random_target(rng, **_SMALL), random_drafter(rng, **_MASK)
    tokens, lengths = _prompts(rng, 8, 20, 12)
    options = dict(max_new_tokens=_NEW, temperature=0.9, top_p=0.95, seed=int(rng.integers(1000)))
    texts = []
    for mode, budget in (("ar", 1), ("chain", 1), ("ddtree", 5), ("ddtree", 24)):
        config = DecodeConfig(mode=mode, budget=budget, **options)
        texts.append(
            continuations(quick_decode(target, drafter, tokens, lengths, config=config), lengths)
        )
    # A draw that falls within rounding of a boundary may part two runs; more than one would not be that.
    for other in texts[1:]:
        assert sum(a != b for a, b in zip(texts[0], other, strict=True)) <= 1
    config = DecodeConfig(mode="ddtree", budget=5, **options)
    alone = [
        continuations(
            quick_decode(target, drafter, tokens[b : b + 1], lengths[b : b + 1], config=config),
            lengths[b : b + 1],
        )[0]
        for b in range(3)
    ]
    assert sum(a != b for a, b in zip(alone, texts[2][:3], strict=True)) <= 1


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_decode_loop_copies_no_cache(rng, cache_dtype):
    target, drafter = random_target(rng, cache_dtype=cache_dtype), random_drafter(rng)
    tokens, lengths = _prompts(rng, 2, 16, 50)
    config = DecodeConfig(max_new_tokens=40, budget=12)
    prefill = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state")
    state = prefill.lower(target, drafter, tokens, lengths, config=config).out_info.state
    text = (
        prefill.lower(target, drafter, tokens, lengths, config=config, state=state)
        .compile()
        .as_text()
    )
    assert not cache_copies(text, state.cache, state.draft_cache)
    assert not cache_copies(text, state.cache, also=("convert",))
    for name in ("draft_topk", "tree_build", "verify_attn", "append_latents", "commit_path"):
        assert f'"ddtree_{name}"' in text, name
