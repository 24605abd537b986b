"""Argument checks at trace time: what was expected, and what was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# What JAX makes of numbers of 64 bits, unless it was told to keep them.
_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
}


def array(name: str, value, shape: tuple[int | str, ...], dtypes) -> jax.Array:
    """`value` as an array of one of `dtypes` whose shape matches; a string in `shape` matches any size.

    Numbers of 64 bits count as those of 32, integers provided that they fit: the host's, and a traced Python number.

    Raises:
      ValueError: another dtype or shape, or integers that do not fit.
    """
    allowed = [jnp.dtype(d) for d in (dtypes if isinstance(dtypes, tuple) else (dtypes,))]
    names = " or ".join(d.name for d in allowed)
    if not isinstance(value, jax.Array):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be an array of {names} ({error})") from error
        if _NARROW.get(value.dtype) in allowed:
            value = _narrowed(name, value, _NARROW[value.dtype])
    elif value.weak_type and _NARROW.get(value.dtype) in allowed:
        value = value.astype(_NARROW[value.dtype])
    if value.dtype not in allowed:
        raise ValueError(f"{name} must be {names}, not {value.dtype.name}")
    fits = len(value.shape) == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join(map(str, shape)) + "]"
        raise ValueError(f"{name} must have shape {wanted}, not {list(value.shape)}")
    return jnp.asarray(value)


def _narrowed(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`value` in the narrower `dtype`; an integer never wraps around."""
    if dtype.kind in "iu" and value.size:
        limits = np.iinfo(dtype)
        if value.min() < limits.min or value.max() > limits.max:
            raise ValueError(
                f"{name} must lie in {limits.min} .. {limits.max} ({dtype.name}), "
                f"but holds {value.min() if value.min() < limits.min else value.max()}"
            )
    return value.astype(dtype)


def between(name: str, value, low: int, high: int) -> int:
    """`value` as a Python int if it is a whole number in low .. high.

    Raises:
      ValueError: otherwise, and for an array whose value only the running program knows.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        whole = value.__index__()
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{name} must be a whole number, not {_shown(value)}") from error
    if not low <= whole <= high:
        raise ValueError(f"{name} must lie in {low} .. {high}, not {whole}")
    return whole


def number(name: str, value) -> float:
    """`value` as a Python float.

    Raises:
      ValueError: no real number, or an array whose value only the running program knows.
    """
    try:
        if isinstance(value, bool | np.bool_ | str | bytes) or np.ndim(value) != 0:
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number, not {_shown(value)}") from error


def float32(name: str, value) -> float:
    """`value` as a Python float that float32 holds too.

    Raises:
      ValueError: no real number, one that is not finite in float32, or an array whose value only the running program
        knows.
    """
    value = number(name, value)
    largest = float(np.finfo(np.float32).max)
    if not abs(value) <= largest:
        raise ValueError(f"{name} must be finite in float32, at most {largest:.3g}, not {value}")
    return value


def instance(name: str, value, kind: type):
    """`value` if it is of the class.

    Raises:
      TypeError: otherwise.
    """
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, not {given}")
    return value


def flag(name: str, value) -> bool:
    """`value` as a Python bool.

    Raises:
      ValueError: anything but True and False.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, not {_shown(value)}")
    return bool(value)


def layer_index(layer, layers: int) -> jax.Array:
    """A layer index, a Python int in range or an i32 scalar that a loop may compute."""
    if layers < 1:
        raise ValueError("cache must have at least one layer")
    if not isinstance(layer, jax.Array):
        return jnp.int32(between("layer", layer, 0, layers - 1))
    if layer.dtype == jnp.int64:
        # A loop's counter where 64-bit numbers are allowed; one outside stays outside.
        layer = jnp.clip(layer, -1, layers).astype(jnp.int32)
    return array("layer", layer, (), jnp.int32)


def cache_scale(value, cache: jax.Array) -> jax.Array:
    """The scale of an e4m3 cache's layers as the handlers take it: f32[layers], or f32[0] for none.

    Raises:
      ValueError: another shape or dtype, a scale for a cache of another dtype, or numbers of the host that are no
        normal ones above 0. Those of a `jax.Array` are not looked at: that would wait for its device.
    """
    if value is None:
        return jnp.zeros((0,), jnp.float32)
    if cache.dtype != jnp.float8_e4m3fn:
        raise ValueError(
            f"cache_scale is for a float8_e4m3fn cache, and this one is {cache.dtype.name}: leave it out"
        )
    scale = array("cache_scale", value, (cache.shape[0],), jnp.float32)
    if not isinstance(value, jax.Array):
        numbers = np.asarray(value, np.float32)
        limits = np.finfo(np.float32)
        if not np.all((numbers >= limits.tiny) & (numbers <= limits.max)):
            raise ValueError(
                f"cache_scale must be finite and at least {limits.tiny:.2g}, the smallest normal float32, "
                f"not {numbers.tolist()}"
            )
    return scale


def is_known(*values) -> bool:
    """Whether all values are at hand; under a transformation such as jit they are not."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _shown(value) -> str:
    return "a traced array: make it static" if not is_known(value) else repr(value)
