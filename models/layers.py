"""The two layers that the target and the drafter share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.few_rows import few_rows_dot

_SUM = 32  # numbers that XLA's CPU backend adds up within a larger operation


class Linear(nnx.Module):
    """x @ kernel, without bias. `kernel` is [inputs, outputs]; zeros without `rngs`."""

    def __init__(
        self, inputs: int, outputs: int, *, param_dtype, rngs: nnx.Rngs | None, std: float = 0.02
    ):
        self.kernel = nnx.Param(normal((inputs, outputs), param_dtype, rngs, std))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] to [..., outputs]."""
        return dot(x, self.kernel[...])


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; statistics in float32, product in x's dtype."""

    def __init__(self, size: int, eps: float, *, param_dtype):
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size], in x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(_mean(wide * wide) + self.eps)
        # Cast before the weight: in bfloat16 the order shows.
        return wide.astype(x.dtype) * self.weight[...].astype(x.dtype)


def _mean(x: jax.Array) -> jax.Array:
    """Mean over the last axis, which stays, of size 1."""
    size = x.shape[-1]
    if jax.default_backend() != "cpu" or size % _SUM:
        return jnp.mean(x, axis=-1, keepdims=True)
    # XLA's CPU backend makes two operations of a longer sum, apart from what comes before and after. The barrier
    # keeps it from making one sum of these two.
    parts = jnp.sum(x.reshape(*x.shape[:-1], size // _SUM, _SUM), axis=-2)
    return jnp.sum(jax.lax.optimization_barrier(parts), axis=-1, keepdims=True) / size


class MLP(nnx.Module):
    """`gated_mlp` with kernels of its own."""

    def __init__(
        self, size: int, inner: int, *, param_dtype, rngs: nnx.Rngs | None, std: float = 0.02
    ):
        options = {"param_dtype": param_dtype, "rngs": rngs, "std": std}
        self.gate_proj = Linear(size, inner, **options)
        self.up_proj = Linear(size, inner, **options)
        self.down_proj = Linear(inner, size, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] to [..., size]."""
        kernels = (layer.kernel[...] for layer in (self.gate_proj, self.up_proj, self.down_proj))
        return gated_mlp(x, *kernels)


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of [..., D], with kernels [D, I], [D, I] and [I, D]."""
    inner = jax.nn.silu(dot(x, gate)) * dot(x, up)
    return dot(inner, down)


def dot(x: jax.Array, kernel: jax.Array, **options) -> jax.Array:
    """x @ kernel in x's dtype; `options` as `few_rows_dot` takes them.

    A narrower kernel is read as it lies and widened within the product; a wider one is rounded to x's dtype before.
    """
    if kernel.dtype.itemsize > x.dtype.itemsize:
        kernel = kernel.astype(x.dtype)
    return few_rows_dot(x, kernel, **options)


def float_dtype(name: str, value, *, also: tuple[str, ...] = ()):
    """`value` as a dtype, one that models compute in or hold their parameters in; one of `also` as it is.

    Raises:
      ValueError: another one; the message calls the argument `name`.
    """
    if isinstance(value, str) and value in also:
        return value
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16):
        *others, last = map(repr, ("float32", "bfloat16", *also))
        shown = repr(value) if dtype is None or isinstance(value, str) else dtype
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {shown}")
    return dtype


def normal(shape: tuple[int, ...], dtype, rngs: nnx.Rngs | None, std: float) -> jax.Array:
    """Normal numbers of deviation `std`, or zeros without `rngs` (a model about to be loaded)."""
    if rngs is None:
        return jnp.zeros(shape, dtype)
    return (std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
