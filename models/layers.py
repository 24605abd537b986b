"""The two layers that the target and the drafter share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.few_rows import few_rows_dot


class Linear(nnx.Module):
    """x @ kernel, without bias. `kernel` is [inputs, outputs]; zeros without `rngs`."""

    def __init__(
        self, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs | None, std: float = 0.02
    ):
        self.kernel = nnx.Param(normal((inputs, outputs), dtype, rngs, std))

    def __call__(self, x: jax.Array) -> jax.Array:
        return few_rows_dot(x, self.kernel[...])


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; statistics in float32, product in x's dtype."""

    def __init__(self, size: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        # Cast before the weight: in bfloat16 the order shows.
        return wide.astype(x.dtype) * self.weight[...]


class MLP(nnx.Module):
    """`gated_mlp` with kernels of its own."""

    def __init__(self, size: int, inner: int, *, dtype, rngs: nnx.Rngs | None, std: float = 0.02):
        self.gate_proj = Linear(size, inner, dtype=dtype, rngs=rngs, std=std)
        self.up_proj = Linear(size, inner, dtype=dtype, rngs=rngs, std=std)
        self.down_proj = Linear(inner, size, dtype=dtype, rngs=rngs, std=std)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernels = (layer.kernel[...] for layer in (self.gate_proj, self.up_proj, self.down_proj))
        return gated_mlp(x, *kernels)


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of [..., D], with kernels [D, I], [D, I] and [I, D]."""
    inner = jax.nn.silu(few_rows_dot(x, gate)) * few_rows_dot(x, up)
    return few_rows_dot(inner, down)


def normal(shape: tuple[int, ...], dtype, rngs: nnx.Rngs | None, std: float) -> jax.Array:
    """Normal numbers of deviation `std`, or zeros without `rngs` (a model about to be loaded)."""
    if rngs is None:
        return jnp.zeros(shape, dtype)
    return (std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
