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

from ddtree_jax import chain_tree

# Widest distance from the best logit that rounding may decide either way: absolute in float32, one step of
# bfloat16 (2^-7 of the value's power of two) else. An e4m3 cache counts as the latter: rounding of the last float32
# bit decides now and then to which of two e4m3 numbers, 6 % apart, one of a row's numbers goes.
_FLOAT32_TIE = 1e-4
# Tokens a pass of the judge over a cache.
_CHUNK = 64


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that one of the two lacks); None if all are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def is_tie(target, prefix: Sequence[int], tokens: Sequence[int], dtype) -> bool:
    """Whether the target's logits after `prefix` put all of `tokens` at the top but for rounding of the logits."""
    rounds_cache = getattr(target, "cache_dtype", None) == jnp.float8_e4m3fn
    # The logits that the bound is meant for: a GPU's default for float32 is TF32.
    with jax.default_matmul_precision("highest"):
        if rounds_cache:
            logits = _cached_logits(target, prefix)
        else:
            ids = jnp.asarray([prefix], jnp.int32)
            positions = jnp.arange(len(prefix), dtype=jnp.int32)[None]
            logits = np.asarray(target(ids, positions)[0, -1], np.float64)
    best = logits.max()
    step = 2.0 ** (np.floor(np.log2(max(abs(best), 1e-30))) - 7)
    bound = _FLOAT32_TIE if jnp.dtype(dtype) == jnp.float32 and not rounds_cache else step
    return bool(all(best - logits[token] <= bound for token in tokens))


@jax.jit
def _verify(target, tree, cache, lengths):
    hidden, _, cache = target.verify(tree, cache, lengths)
    return hidden, cache


def _cached_logits(target, prefix: Sequence[int]) -> np.ndarray:
    """f64[V]: the logits after `prefix` of a pass whose latents went through the target's cache."""
    chunks = -(-len(prefix) // _CHUNK)
    cache = target.init_cache(1, chunks * _CHUNK)
    for i in range(chunks):
        part = np.zeros((1, _CHUNK), np.int32)
        here = prefix[i * _CHUNK : (i + 1) * _CHUNK]
        part[0, : len(here)] = here
        tree = chain_tree(part, np.array([len(here)], np.int32))
        hidden, cache = _verify(target, tree, cache, np.array([i * _CHUNK], np.int32))
    return np.asarray(target.head(hidden[:, len(here) - 1])[0], np.float64)


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
