"""Compares the tokens of two decodes: equal, or different at a tie of the target's logits.

Rounding may also decide a tie between experts: a router whose scores for the last expert taken and the first one
left out are nearly equal takes the one or the other, and the logits then differ by more than rounding. Such a tie
is not looked for here: it counts as a difference, and whoever sees one must look at the router's scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Widest distance from the best logit that rounding may decide either way: absolute in float32, one step of
# bfloat16 (2^-7 of the value's power of two) else.
_FLOAT32_TIE = 1e-4


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that one of the two lacks); None if all are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def is_tie(target, prefix: Sequence[int], tokens: Sequence[int], dtype) -> bool:
    """Whether the target's logits after `prefix` put all of `tokens` at the top but for rounding of the logits."""
    ids = jnp.asarray([prefix], jnp.int32)
    positions = jnp.arange(len(prefix), dtype=jnp.int32)[None]
    # The logits that the bound is meant for: a GPU's default for float32 is TF32.
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(target(ids, positions)[0, -1], np.float64)
    best = logits.max()
    step = 2.0 ** (np.floor(np.log2(max(abs(best), 1e-30))) - 7)
    bound = _FLOAT32_TIE if jnp.dtype(dtype) == jnp.float32 else step
    return bool(all(best - logits[token] <= bound for token in tokens))


def judge(
    target, prompt: Sequence[int], baseline: Sequence[int], tokens: Sequence[int], dtype
) -> str:
    """ "same", "tie" (they part where the target is undecided between just their tokens) or "different".

    For greedy decodes: under sampling the logits alone decide nothing. Texts that part at a tie between
    experts are "different" too, unless it happens to leave the logits a tie.
    """
    at = first_difference(baseline, tokens)
    if at is None:
        return "same"
    if at >= min(len(baseline), len(tokens)):
        return "different"
    pair = (baseline[at], tokens[at])
    return "tie" if is_tie(target, [*prompt, *baseline[:at]], pair, dtype) else "different"
