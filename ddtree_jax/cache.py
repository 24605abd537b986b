"""The latent cache: [layers, B, S, 576], always whole, updated in place.

It holds the model's float32 or bfloat16, or float8_e4m3fn in half of bfloat16's bytes: a number then stands for itself
times the scale of its layer. e4m3 has 3 bits of mantissa, 448 as its largest number, and no infinity.

Slicing a stacked cache around a custom call copies it, so every kernel takes all of it and a layer index.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax import _checks
from ddtree_jax._primitive import kernel_primitive
from ddtree_jax.accept import AcceptedPath

ROW_DIM = 576  # 512 latent and 64 rotary numbers
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)


def append_latents(cache, latents, lengths, *, layer, cache_scale=None) -> jax.Array:
    """Writes rows behind each request's prefix: cache[layer, b, lengths[b] + i] = latents[b, i].

    Args:
      cache: float32, bfloat16 or float8_e4m3fn [layers, B, S, width]; give it away, the result is the same
        buffer.
      latents: [B, N, width] of the same dtype; float32 or bfloat16 for a float8_e4m3fn cache, which gets
        latents / cache_scale[layer], divided in float32, rounded to nearest even and saturated at 448
        either way. NaN and infinity become NaN, so that what is not finite stays visible.
      lengths: i32[B]. Rows that would fall outside 0 .. S - 1 are dropped.
      layer: an int or an i32 scalar; an array outside 0 .. layers - 1 writes nothing.
      cache_scale: f32[layers] for a float8_e4m3fn cache, finite, normal and above 0; None means 1. A `jax.Array`
        is not looked at: by a scale of 0 or NaN rows become NaN or +-448, and a subnormal one counts as 0 on
        some devices.

    Returns:
      The cache.

    Raises:
      ValueError: another dtype, shape or layer, a scale for a cache of another dtype, or a scale of host numbers
        that are not as said.
    """
    cache = _checks.array("cache", cache, ("layers", "B", "S", "width"), DTYPES)
    layers, batch, _, width = cache.shape
    floats = DTYPES[:2] if cache.dtype == jnp.float8_e4m3fn else cache.dtype
    latents = _checks.array("latents", latents, (batch, "N", width), floats)
    if latents.shape[1] < 1:
        raise ValueError("latents must have at least one row N a request")
    lengths = _checks.array("lengths", lengths, (batch,), jnp.int32)
    index = _checks.layer_index(layer, layers)
    scale = _checks.cache_scale(cache_scale, cache)
    return _append_latents.bind(cache, latents, lengths, index, scale)[0]


def commit_path(cache, path: AcceptedPath, lengths) -> jax.Array:
    """Moves the accepted nodes' rows up behind the prefix in every layer (DDTree, section 3.3).

    cache[:, b, lengths[b] + j] = cache[:, b, lengths[b] + path.nodes[b, j]] for j < num_emitted[b].

    Args:
      cache: float32, bfloat16 or float8_e4m3fn [layers, B, S, width], whose rows move as they are; give it
        away, the result is the same buffer.
      path: from `tree_accept`.
      lengths: i32[B], rows before the tree's.

    Returns:
      The cache.

    Raises:
      ValueError: another dtype or shape.
      TypeError: `path` is no `AcceptedPath`.
    """
    _checks.instance("path", path, AcceptedPath)
    cache = _checks.array("cache", cache, ("layers", "B", "S", "width"), DTYPES)
    batch = cache.shape[1]
    nodes = _checks.array("path.nodes", path.nodes, (batch, "L + 1"), jnp.int32)
    if nodes.shape[1] < 1:
        raise ValueError("path.nodes must have at least the root's column")
    num_emitted = _checks.array("path.num_emitted", path.num_emitted, (batch,), jnp.int32)
    lengths = _checks.array("lengths", lengths, (batch,), jnp.int32)
    return _commit_path.bind(cache, nodes, num_emitted, lengths)[0]


_append_latents = kernel_primitive(
    "append_latents",
    lambda cache, *_: [jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
    batch_axes=(1, 0, 0, None, None),
    result_batch_axes=(1,),
    aliases={0: 0},
)

_commit_path = kernel_primitive(
    "commit_path",
    lambda cache, *_: [jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
    batch_axes=(1, 0, 0, 0),
    result_batch_axes=(1,),
    aliases={0: 0},
)
