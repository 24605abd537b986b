"""Compares the tokens of two decodes: equal, or different where rounding decides.

Rounding decides between tokens whose logits are nearly equal, and between experts: a router whose scores for the last
expert taken and the first one left out are nearly equal takes the one or the other, and the logits then differ by
much more than rounding. In float32 a tie of experts is too rare to be allowed for; in bfloat16, or with an e4m3
cache, passes of one node and of eight, which sum in another order, part there now and then. It is told apart.
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
# How far rounding is taken to move a router's score, which lies in 0 .. 1: a step of bfloat16 below 1. No bound, since
# what a layer is given has been rounded many times; experts that an H200 chose differently were 0.001 apart.
_SCORE_STEP = 2.0**-8
# Passes with scores moved so at random. Of two experts that tie a pass takes each with about even odds if they are
# much closer than that, so that of up to three ties at once any one outcome is seen with 98% probability.
_MOVED = 32
# Tokens that the judge's passes are padded to, and of one over a cache.
_CHUNK = 64


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that one of the two lacks); None if all are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def tie(target, prefix: Sequence[int], tokens: Sequence[int], dtype) -> str | None:
    """By what tie rounding decides which of `tokens` follows `prefix`: "tie", "expert tie", or None if it does not.

    "tie": the target's logits put all of them at the top but for rounding of the logits. "expert tie", where arithmetic
    is in bfloat16 or the cache in e4m3: each is at the top so in some pass with the routers' scores moved by what
    rounding may move them.
    """
    cached = getattr(target, "cache_dtype", None) == jnp.float8_e4m3fn
    exact = jnp.dtype(dtype) == jnp.float32 and not cached
    best = _best(target, prefix, tokens, exact, cached)
    if best.all():
        return "tie"
    for seed in range(0 if exact else _MOVED):
        best |= _best(_with_moved_scores(target, seed), prefix, tokens, exact, cached)
        if best.all():
            return "expert tie"
    return None


def _best(target, prefix, tokens, exact, cached) -> np.ndarray:
    """bool[len(tokens)]: which of them the target's logits after `prefix` put at the top but for rounding."""
    # The logits that the bound is meant for: a GPU's default for float32 is TF32.
    with jax.default_matmul_precision("highest"):
        if cached:
            logits = _cached_logits(target, prefix)
        else:
            # What follows the prefix is not seen by it, and spares a program for each length.
            ids = np.zeros((1, -(-len(prefix) // _CHUNK) * _CHUNK), np.int32)
            ids[0, : len(prefix)] = prefix
            logits = np.asarray(_logits(target, ids)[0, len(prefix) - 1], np.float64)
    best = logits.max()
    step = 2.0 ** (np.floor(np.log2(max(abs(best), 1e-30))) - 7)
    return best - logits[list(tokens)] <= (_FLOAT32_TIE if exact else step)


@jax.jit
def _logits(target, ids):
    return target(ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None])


def _with_moved_scores(target, seed: int):
    """The target with each router's choosing bias moved at random by at most what rounding may move a score."""
    rng = np.random.default_rng(seed)

    def moved(path, leaf):
        if "e_score_correction_bias" not in jax.tree_util.keystr(path):
            return leaf
        return leaf + rng.uniform(-_SCORE_STEP, _SCORE_STEP, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(moved, target)


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
    """ "same", "tie" or "expert tie" (they part where that decides between just their tokens), or "different".

    For greedy decodes: under sampling the logits alone decide nothing. With both numbers in float32, texts that part
    at a tie of experts are "different" too, unless it happens to leave the logits a tie.
    """
    at = first_difference(baseline, tokens)
    if at is None:
        return "same"
    if at >= min(len(baseline), len(tokens)):
        return "different"
    pair = (baseline[at], tokens[at])
    return tie(target, [*prompt, *baseline[:at]], pair, dtype) or "different"
