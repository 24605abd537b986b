"""The target's token after each node: argmax, or a draw that depends on nothing but where it is.

Sample and match (DDTree, section 3.3): the target draws its own token at every node, and the walk
keeps the drafts that it happens to equal. Every emitted token is then a draw of the target given its
own prefix, so the output's distribution is the target's whatever the tree was. The randomness is
keyed by (seed, request, absolute position): the nodes of one depth share their noise, of which one at
most is ever used, and the text does not depend on mode, budget or batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax._varying import vary_as

#: Below this temperature the most probable token is taken as it is.
COLDEST = 1e-5
_SMALLEST = float(np.finfo(np.float32).tiny)  # what lies below may count as 0

# Fixed, so that a seed means the same text whatever the process's default generator is.
_PRNG = "threefry2x32"


def request_keys(seed, request_ids: jax.Array) -> jax.Array:
    """One generator state a request.

    Args:
      seed: i32[] or int.
      request_ids: i32[B].

    Returns:
      u32[B, 2], raw threefry keys.
    """
    base = jax.random.key(seed, impl=_PRNG)
    return jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(base, i))(request_ids))


def prompt_ids(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """A request id made from the prompt alone (FNV-1a over its tokens), so that a prompt's text is
    the same at any place of any batch.

    Args:
      tokens: i32[B, P]. lengths: i32[B].

    Returns:
      i32[B].
    """

    def step(hashes, column):
        position, token = column
        mixed = (hashes ^ token.astype(jnp.uint32)) * jnp.uint32(16777619)
        return jnp.where(position < lengths, mixed, hashes), None

    start = vary_as(jnp.full(lengths.shape, 2166136261, jnp.uint32), tokens, lengths)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hashes, _ = jax.lax.scan(step, start, (positions, tokens.T))
    return jax.lax.bitcast_convert_type(hashes, jnp.int32)


def _ordered(values: jax.Array) -> jax.Array:
    """u32 keys in the order of the f32 values."""
    # -0 and 0 are equal.
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    negative = (bits >> 31).astype(bool)
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(keys: jax.Array, weights: jax.Array, least) -> jax.Array:
    """The largest key t, u32[..., 1], whose tokens {key >= t} weigh at least `least` together.

    Bit by bit from the top: 32 reductions over the vocabulary in place of a sort of it.
    """

    def bit(i, threshold):
        trial = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= trial, weights, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= least, trial, threshold)

    start = vary_as(jnp.zeros((*keys.shape[:-1], 1), jnp.uint32), keys, weights)
    return jax.lax.fori_loop(0, 32, bit, start)


def filter_logits(logits: jax.Array, *, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """Sets the logits that top-k and then top-p exclude to -inf.

    Tokens that tie with the last one kept are kept too.

    Args:
      logits: f32[..., V], after temperature.
      top_k: how many to keep; 0 or at least V keeps all.
      top_p: probability to keep, of what top_k left; 1 keeps all, and as it goes to 0 the most probable is left.

    Returns:
      f32[..., V].
    """
    if 0 < top_k < logits.shape[-1]:
        keys = _ordered(logits)
        logits = jnp.where(keys >= _threshold(keys, jnp.int32(1), top_k), logits, -jnp.inf)
    # float32 decides: it rounds what is next to 1, and what lies below its smallest number no sum would reach.
    if np.float32(top_p) < 1:
        keys = _ordered(logits)
        least = max(top_p, _SMALLEST)
        kept = keys >= _threshold(keys, jax.nn.softmax(logits, axis=-1), least)
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def position_noise(keys: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise of the tokens at absolute positions.

    Args:
      keys: u32[B, 2] of `request_keys`.
      positions: i32[B, T].

    Returns:
      f32[B, T, V].
    """

    def one(key, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_PRNG), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


def target_tokens(
    logits: jax.Array,
    depths: jax.Array,
    first_positions: jax.Array,
    keys: jax.Array,
    *,
    max_depth: int,
    temperature=None,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab_is_split: bool = False,
) -> jax.Array:
    """The target's token after every node; -1 where its largest logit is not finite or one is NaN.

    Args:
      logits: f32[B, N, V].
      depths: i32[B, N], 0 .. max_depth.
      first_positions: i32[B], absolute position of the token that follows the root.
      keys: u32[B, 2] of `request_keys`; unused without a temperature.
      max_depth: the deepest that a node can be.
      temperature: f32[] or f32[B], finite and at least 0; requests below `COLDEST` get their most probable tokens, and
        without a temperature all do.
      top_k, top_p: as `filter_logits` takes them.
      vocab_is_split: the logits lie over several devices, each with its own tokens.

    Returns:
      i32[B, N].
    """
    if temperature is None:
        first, sound = _largest(logits, vocab_is_split)
    else:
        temperature = jnp.asarray(temperature, jnp.float32)
        temperature = jnp.broadcast_to(temperature, logits.shape[:1])[:, None, None]
        scores = filter_logits(_scaled(logits, temperature), top_k=top_k, top_p=top_p)
        positions = first_positions[:, None] + jnp.arange(max_depth + 1, dtype=jnp.int32)
        noise = position_noise(keys, positions, logits.shape[-1])
        scores = scores + jnp.take_along_axis(noise, depths[..., None], axis=1)
        scores = jnp.where(temperature < COLDEST, logits, scores)
        first, _ = _largest(scores, vocab_is_split)
        # A filter may drop what is not finite, so that the scores do not tell.
        kinds = jnp.where(logits < jnp.inf, (logits > -jnp.inf).astype(jnp.int32), 2)
        sound = jnp.max(kinds, axis=-1) == 1
    return jnp.where(sound, first, -1)


def _scaled(logits, temperature):
    """What softmax(logits / temperature) is a softmax of: at most 0, and 0 for the most probable token.

    Logits far below it become -inf, and none of these steps overflows upwards, whatever the logits and however hot or
    cold. In sixteenths, so that the difference of two of float32's largest numbers is one as well, and the reciprocal
    of the hottest temperature is none of those that count as 0.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    inverse = 1 / (jnp.maximum(temperature, COLDEST) / 16)
    return (logits / 16 - largest / 16) * inverse


def _largest(scores: jax.Array, vocab_is_split: bool) -> tuple[jax.Array, jax.Array]:
    """The first of each row's largest, i32[...], and whether that is finite and no other is NaN."""
    if vocab_is_split:
        return _largest_by_reductions(scores)
    return jax.lax.platform_dependent(
        scores, cpu=_largest_by_reductions, default=_largest_by_argmax
    )


def _largest_by_argmax(scores):
    """One read of the scores. XLA's CPU backend goes through an argmax one by one."""
    first = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    best = jnp.take_along_axis(scores, first[..., None], axis=-1, mode="promise_in_bounds")
    return first, jnp.isfinite(best[..., 0])


def _largest_by_reductions(scores):
    """Two reads. Over a split vocabulary these are two small sums over devices."""
    best = jnp.max(scores, axis=-1, keepdims=True)
    tokens, vocab = jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape[-1]
    # XLA's CPU backend loses a NaN in a maximum over many numbers, so that the second reduction looks for it.
    found = jnp.where(scores == best, tokens, jnp.where(jnp.isnan(scores), -1, vocab))
    first = jnp.min(found, axis=-1)
    return first, jnp.isfinite(best[..., 0]) & (first >= 0)
