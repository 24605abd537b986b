"""Ragged prompts of few tokens, what was decoded after them, and how far two such texts may differ."""

import jax.numpy as jnp
import numpy as np
from losslessness import first_difference, judge
from routing import CLEAR, routing_margin

NEW = 24  # tokens to decode
# Few tokens, so that a drafter that knows nothing is right now and then.
SMALL = {"vocab_size": 12, "eos_token_id": 3}
MASK = {"vocab_size": 12, "dflash_config": {"mask_token_id": 11, "target_layer_ids": [2, 0]}}


def random_prompts(rng, batch, width, vocab):
    lengths = rng.integers(1, width + 1, batch).astype(np.int32)
    return rng.integers(0, vocab, (batch, width)).astype(np.int32), lengths


def continuations(result, lengths):
    """Token ids that follow each prompt of `lengths` i32[B] in a `DecodeResult`."""
    # Of a JAX array every slice of another length would be compiled.
    tokens, ends = np.asarray(result.tokens), np.asarray(result.lengths)
    return [tokens[b, n : ends[b]].tolist() for b, n in enumerate(lengths)]


def ties_between(target, tokens, lengths, plain, texts):
    """How many texts part from the plain ones, which only ties may make them do: of logits or of experts."""
    ties = 0
    for row, length, one, other in zip(tokens, lengths, plain, texts, strict=True):
        prompt = row[:length].tolist()
        verdict = judge(target, prompt, one, other, jnp.float32)
        if verdict == "different":
            # Experts that rounding chose differ by more than a tie of logits.
            context = [*prompt, *one[: first_difference(one, other)]]
            assert routing_margin(target, [context]) < CLEAR, (prompt, one, other)
        ties += verdict != "same"
    return ties
