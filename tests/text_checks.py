"""What decodes emit, and whether two of them differ by more than ties."""

import jax.numpy as jnp
import numpy as np
from losslessness import first_difference, judge
from routing import CLEAR, routing_margin


def continuations(result, lengths):
    """Token ids that follow each prompt of `lengths` i32[B] in a `DecodeResult`."""
    # Of a JAX array every slice of another length would be compiled.
    tokens, ends = np.asarray(result.tokens), np.asarray(result.lengths)
    return [tokens[b, n : ends[b]].tolist() for b, n in enumerate(lengths)]


def ties(target, tokens, lengths, plain, texts):
    """How many texts part from the plain ones, which only ties may make them do: of logits or of experts."""
    count = 0
    for row, length, one, other in zip(tokens, lengths, plain, texts, strict=True):
        prompt = row[:length].tolist()
        verdict = judge(target, prompt, one, other, jnp.float32)
        if verdict == "different":
            # Experts that rounding chose differ by more than a tie of logits.
            context = [*prompt, *one[: first_difference(one, other)]]
            assert routing_margin(target, [context]) < CLEAR, (prompt, one, other)
        count += verdict != "same"
    return count
