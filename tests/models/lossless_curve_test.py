"""Decoding by a cost curve, or over a rounded cache, emits what plain decoding emits, ties counted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import quick_compile
from ragged_texts import MASK, NEW, SMALL, continuations, random_prompts, ties_between
from tiny_models import random_drafter, random_target

from ddtree_jax import CostCurve, DecodeConfig, FinishReason, ddtree_decode
from ddtree_jax.decode import draft_tree

decode = quick_compile.jit(ddtree_decode, static_argnames="config")
draft = quick_compile.jit(draft_tree, static_argnames="config")


def test_a_cost_curve_changes_the_rounds_and_not_the_text(rng):
    """Passes of three sizes; nodes that differ between rounds and requests."""
    # A node costs about what one of middling probability promises.
    idle = np.asarray([1.0, 1.02, 1.05])
    sizes = (1, 6, 17)
    verify = idle + rng.uniform(0.02, 0.06) * (np.asarray(sizes) - 1)
    curve = CostCurve(sizes, tuple(verify), tuple(idle), 0.05)
    options = dict(max_new_tokens=NEW, prefill_chunk=32)
    plain = DecodeConfig(mode="ar", **options)
    spine = bool(rng.integers(2))
    start = DecodeConfig(cost_curve=curve, keep_spine=spine, max_rounds=0, **options)
    step = dataclasses.replace(start, max_rounds=1)
    ties, nodes = 0, set()
    for _ in range(3):
        target, drafter = random_target(rng, **SMALL), random_drafter(rng, **MASK)
        tokens, lengths = random_prompts(rng, 4, 32, 12)
        result = decode(target, drafter, tokens, lengths, config=start)
        while np.any(np.asarray(result.finish_reason) == FinishReason.RUNNING):
            state = result.state
            if np.any(np.asarray(state.rounds) >= np.asarray(state.pause.next_draft)):
                nodes |= set(
                    np.asarray(draft(target, drafter, state, config=step).num_nodes).tolist()
                )
            result = decode(target, drafter, tokens, lengths, config=step, state=state)
        wanted = continuations(decode(target, drafter, tokens, lengths, config=plain), lengths)
        ties += ties_between(target, tokens, lengths, wanted, continuations(result, lengths))
    print("spine", spine, "ties", ties, "nodes", nodes)
    assert ties <= 2 and len(nodes - {0}) > 3


def test_ragged_prompts_in_three_modes_over_an_e4m3_cache(rng):
    """Every mode reads rows that were rounded before anything attended to them, so that all see the same context."""
    scale = tuple(rng.uniform(0.1, 2, 3))
    target = random_target(rng, cache_dtype="float8_e4m3fn", cache_scale=scale, **SMALL)
    drafter = random_drafter(rng, **MASK)
    tokens, lengths = random_prompts(rng, 20, 64, 12)
    texts = {}
    for mode in ("ar", "chain", "ddtree"):
        config = DecodeConfig(mode=mode, budget=16, max_new_tokens=NEW, prefill_chunk=32)
        result = decode(target, drafter, tokens, lengths, config=config)
        assert result.state.cache.dtype == jnp.float8_e4m3fn
        texts[mode] = continuations(result, lengths)
    ties = [
        ties_between(target, tokens, lengths, texts["ar"], texts[mode])
        for mode in ("chain", "ddtree")
    ]
    print("ties", ties)
    assert sum(ties) <= 4
