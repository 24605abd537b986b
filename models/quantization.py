"""Packed int4 weights as compressed-tensors' `pack-quantized` format stores them.

A weight [..., outputs, inputs] becomes words i32[..., outputs, inputs / 8] and scales
[..., outputs, inputs / 32]: a number q in -8 .. 7 is stored as the nibble q + 8, eight to a word along
the inputs, the first in the lowest bits, and stands for q * scale of its group of 32 inputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32  # inputs that share a scale
PER_WORD = 8  # nibbles in an int32


def quantize(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds to int4 with one scale, absmax / 7, for each 32 inputs: -8 stays unused, as in K2.6.

    Returns:
      values i8[..., outputs, inputs] in -7 .. 7, and scales bf16[..., outputs, inputs / 32]; of a group that
      holds NaN or infinity nothing dequantizes to a finite number.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"the last axis must be a multiple of {GROUP}, not {weight.shape[-1]}")
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, GROUP)
    # XLA's CPU backend loses a NaN in a maximum over many numbers; a group with one is NaN throughout.
    broken = jnp.any(jnp.isnan(groups), axis=-1)
    largest = jnp.where(broken, jnp.nan, jnp.max(jnp.abs(groups), axis=-1))
    scale = (largest / 7).astype(jnp.bfloat16)
    divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]
    values = jnp.clip(jnp.round(groups / divisor), -7, 7).astype(jnp.int8)
    return values.reshape(weight.shape), scale


def pack(values: jax.Array) -> jax.Array:
    """i8[..., inputs] in -8 .. 7 to words i32[..., inputs / 8]."""
    if values.shape[-1] % PER_WORD:
        raise ValueError(f"the last axis must be a multiple of {PER_WORD}, not {values.shape[-1]}")
    nibbles = (
        (values.astype(jnp.int32) + 8).astype(jnp.uint32).reshape(*values.shape[:-1], -1, PER_WORD)
    )
    shifts = np.arange(PER_WORD, dtype=np.uint32) * 4
    # The nibbles do not overlap, so their sum is their union.
    words = jnp.sum(nibbles << shifts, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpack(words: jax.Array) -> jax.Array:
    """i32[..., inputs / 8] to i32[..., inputs] in -8 .. 7."""
    shifts = np.arange(PER_WORD, dtype=np.int32) * 4
    # The mask clears what the arithmetic shift of a negative word drags in.
    nibbles = (words[..., None] >> shifts) & 0xF
    return nibbles.reshape(*words.shape[:-1], -1) - 8


def dequantize(words: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """Words i32[..., inputs / 8] and scales [..., inputs / 32] to weights [..., inputs] of `dtype`.

    The product is taken in `dtype`: in bfloat16 it is what compressed-tensors computes, in float32
    exact.
    """
    values = unpack(words).astype(dtype)
    groups = values.reshape(*scale.shape, GROUP) * scale[..., None].astype(dtype)
    return groups.reshape(values.shape)
