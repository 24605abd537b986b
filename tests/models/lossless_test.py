"""Random targets and drafters in float32: the three modes emit the same tokens, ties counted."""

import jax
import numpy as np
import pytest
import quick_compile
from hlo import cache_copies
from ragged_texts import MASK, NEW, SMALL, continuations, random_prompts, ties_between
from tiny_models import random_drafter, random_target

from ddtree_jax import DecodeConfig, ddtree_decode

decode = jax.jit(ddtree_decode, static_argnames="config")
quick_decode = quick_compile.jit(ddtree_decode, static_argnames="config")


def test_two_hundred_ragged_prompts_in_three_modes(rng):
    ties = accepted = rounds = 0
    for _ in range(5):
        target, drafter = random_target(rng, **SMALL), random_drafter(rng, **MASK)
        # Both as users compile it and with operations that are not fused.
        for stops, decode_once in (((), decode), ((5,), quick_decode)):
            tokens, lengths = random_prompts(rng, 20, 64, 12)
            texts = {}
            for mode in ("ar", "chain", "ddtree"):
                config = DecodeConfig(
                    mode=mode, budget=16, max_new_tokens=NEW, stop_tokens=stops, prefill_chunk=32
                )
                result = decode_once(target, drafter, tokens, lengths, config=config)
                texts[mode] = continuations(result, lengths)
                if mode == "ddtree":
                    histogram = np.asarray(result.accepted_histogram).sum(0)
                    accepted += histogram @ np.arange(len(histogram))
                    rounds += histogram.sum()
            for mode in ("chain", "ddtree"):
                ties += ties_between(target, tokens, lengths, texts["ar"], texts[mode])
    print("ties", ties, "accepted a round", accepted / rounds)
    assert ties <= 4
    assert accepted / rounds > 1.15  # Else drafts were never accepted and nothing was tested.


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_decode_loop_copies_no_cache(rng, cache_dtype):
    target, drafter = random_target(rng, cache_dtype=cache_dtype), random_drafter(rng)
    tokens, lengths = random_prompts(rng, 2, 16, 50)
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
