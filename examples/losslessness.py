"""Compares the tokens of two decodes: equal, or different at a tie of the target's logits."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

# Widest gap of the top two logits that rounding may decide either way (absolute in float32; one step
# of bfloat16 is 2^-8 of the value).
_FLOAT32_TIE = 1e-4
_BFLOAT16_STEP = 2.0**-7


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that one of the two lacks); None if all are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def is_tie(target, prefix: Sequence[int], dtype) -> bool:
    """Whether the target's two best logits after `prefix` are too close for rounding to tell apart."""
    tokens = jnp.asarray([prefix], jnp.int32)
    positions = jnp.arange(len(prefix), dtype=jnp.int32)[None]
    logits = np.sort(np.asarray(target(tokens, positions)[0, -1]))
    gap = logits[-1] - logits[-2]
    if jnp.dtype(dtype) == jnp.float32:
        return bool(gap <= _FLOAT32_TIE)
    return bool(gap <= _BFLOAT16_STEP * max(abs(logits[-1]), 1e-30))


def judge(
    target, prompt: Sequence[int], baseline: Sequence[int], tokens: Sequence[int], dtype
) -> str:
    """ "same", "tie" (they part where the target is undecided) or "different"."""
    at = first_difference(baseline, tokens)
    if at is None:
        return "same"
    return "tie" if is_tie(target, [*prompt, *baseline[:at]], dtype) else "different"
