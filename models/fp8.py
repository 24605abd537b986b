"""Weights in float8 e4m3 whose blocks of 128 x 128 share a float32 scale, as DeepSeek-V3 and K2-Instruct store them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

BLOCK = 128
LARGEST = 448.0  # that float8_e4m3fn has


def blocks(size: int) -> int:
    """Blocks along an axis; the last may be ragged."""
    return -(-size // BLOCK)


def dequantize(values, scales, dtype):
    """float8_e4m3fn [..., rows, columns] times f32 [..., blocks(rows), blocks(columns)].

    The product is taken in float32, then rounded to `dtype`. NumPy arrays give a NumPy array, JAX's a
    JAX array.
    """
    xp = np if isinstance(values, np.ndarray) else jnp
    rows, columns = values.shape[-2:]
    by_row = xp.repeat(scales, BLOCK, axis=-2)[..., :rows, :]
    spread = xp.repeat(by_row, BLOCK, axis=-1)[..., :columns]
    return (values.astype(np.float32) * spread).astype(dtype)


def quantize(weight):
    """f32 [..., rows, columns] to float8_e4m3fn and the scales that `dequantize` takes."""
    rows, columns = weight.shape[-2:]
    down, right = blocks(rows), blocks(columns)
    pad = [(0, 0)] * (weight.ndim - 2)
    pad += [(0, down * BLOCK - rows), (0, right * BLOCK - columns)]
    tiles = jnp.pad(weight, pad).reshape(*weight.shape[:-2], down, BLOCK, right, BLOCK)
    scales = jnp.max(jnp.abs(tiles), axis=(-3, -1)).astype(jnp.float32) / LARGEST
    divisor = jnp.where(scales == 0, 1, scales)[..., :, None, :, None]
    values = (tiles / divisor).reshape(*weight.shape[:-2], down * BLOCK, right * BLOCK)
    return values[..., :rows, :columns].astype(jnp.float8_e4m3fn), scales
