"""Random targets and drafters in float32: with a seed, every mode draws the same tokens."""

import quick_compile
from ragged_texts import MASK, NEW, SMALL, continuations, random_prompts
from tiny_models import random_drafter, random_target

from ddtree_jax import DecodeConfig, ddtree_decode

decode = quick_compile.jit(ddtree_decode, static_argnames="config")


def test_sampled_text_is_the_same_in_every_mode_budget_and_batch(rng):
    target, drafter = random_target(rng, **SMALL), random_drafter(rng, **MASK)
    tokens, lengths = random_prompts(rng, 8, 20, 12)
    options = dict(max_new_tokens=NEW, temperature=0.9, top_p=0.95, seed=int(rng.integers(1000)))
    texts = []
    for mode, budget in (("ar", 1), ("chain", 1), ("ddtree", 5), ("ddtree", 24)):
        config = DecodeConfig(mode=mode, budget=budget, **options)
        texts.append(
            continuations(decode(target, drafter, tokens, lengths, config=config), lengths)
        )
    # A draw that falls within rounding of a boundary may part two runs; more than one would not be that.
    for other in texts[1:]:
        assert sum(a != b for a, b in zip(texts[0], other, strict=True)) <= 1
    config = DecodeConfig(mode="ddtree", budget=5, **options)
    alone = [
        continuations(
            decode(target, drafter, tokens[b : b + 1], lengths[b : b + 1], config=config),
            lengths[b : b + 1],
        )[0]
        for b in range(3)
    ]
    assert sum(a != b for a, b in zip(alone, texts[2][:3], strict=True)) <= 1
