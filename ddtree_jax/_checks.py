"""Argument checks at trace time: what was expected, and what was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def array(name: str, value, shape: tuple[int | str, ...], dtypes) -> jax.Array:
    """`value` as an array of one of `dtypes` whose shape matches; a string in `shape` matches any size.

    Raises:
      TypeError: another dtype. ValueError: another shape.
    """
    value = jnp.asarray(value) if not isinstance(value, jax.Array) else value
    allowed = [jnp.dtype(d) for d in (dtypes if isinstance(dtypes, tuple) else (dtypes,))]
    if value.dtype not in allowed:
        names = " or ".join(d.name for d in allowed)
        raise TypeError(f"{name} must be {names}, not {value.dtype.name}")
    fits = len(value.shape) == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join(map(str, shape)) + "]"
        raise ValueError(f"{name} must have shape {wanted}, not {list(value.shape)}")
    return value


def between(name: str, value: int, low: int, high: int) -> int:
    """`value` if it is a whole number in low .. high.

    Raises:
      TypeError, ValueError: otherwise.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    value = value.__index__()
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in {low} .. {high}, not {value}")
    return value


def layer_index(layer, layers: int) -> jax.Array:
    """A layer index, a Python int in range or an i32 scalar that a loop may compute."""
    if not isinstance(layer, jax.Array):
        return jnp.int32(between("layer", layer, 0, layers - 1))
    return array("layer", layer, (), jnp.int32)
