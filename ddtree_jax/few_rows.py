"""The product of a few rows with a matrix on a CPU: what a decode step mostly consists of."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ddtree_jax import _ffi
from ddtree_jax._primitive import kernel_primitive

# XLA multiplies one row as fast as memory allows, and many rows are worth its packing.
_FEWEST, _MOST = 2, 40
_LANES = 16


def few_rows_dot(x: jax.Array, matrix: jax.Array, *, preferred_element_type=None) -> jax.Array:
    """x @ matrix, by a kernel of its own where one serves: 2 to 40 rows of float32 on a CPU with AVX-512.

    XLA's CPU backend packs the whole matrix first, for 8 rows as for 800, and on one core alone. Two cores stream it
    once instead: a round of 8 nodes took 2.2 to 2.5 steps and not 3.8 (docs/performance.md).

    Args:
      x: [..., inputs].
      matrix: [inputs, outputs].
      preferred_element_type: as `jnp.dot` takes it.

    Returns:
      [..., outputs]. The kernel's sums run over the inputs in order, so that no row depends on how many there are.
    """
    rows = math.prod(x.shape[:-1])
    # What does not fit is jnp.dot's to refuse, before anything runs.
    serves = matrix.ndim == 2 and x.ndim > 0 and x.shape[-1] == matrix.shape[0] > 0
    serves = serves and x.dtype == matrix.dtype == jnp.float32 and matrix.shape[1] % _LANES == 0
    if not (serves and _FEWEST <= rows <= _MOST and _on_one_cpu()):
        return jnp.dot(x, matrix, preferred_element_type=preferred_element_type)
    outputs = matrix.shape[1]
    return _dot(x.reshape(rows, -1), matrix).reshape(*x.shape[:-1], outputs)


@functools.cache
def _on_one_cpu() -> bool:
    """Whether the kernel can run here. On a mesh XLA splits its own products, but no custom call."""
    return _ffi.cpu.has_few_rows and jax.default_backend() == "cpu" and jax.device_count() == 1


@jax.custom_jvp
def _dot(x, matrix):
    return _few_rows_dot.bind(x, matrix, kernel=False)[0]


@_dot.defjvp
def _dot_jvp(primals, tangents):
    (x, matrix), (x_dot, matrix_dot) = primals, tangents
    return _dot(x, matrix), x_dot @ matrix + x @ matrix_dot


_few_rows_dot = kernel_primitive(
    "few_rows_dot",
    lambda x, matrix, **_: [jax.ShapeDtypeStruct((x.shape[0], matrix.shape[1]), x.dtype)],
    batch_axes=(0, None),
    result_batch_axes=(0,),
    # Programs traced here are lowered for CUDA too, to look at them.
    plain={"cuda": ("kernel", lambda x, matrix: [x @ matrix])},
    unshared=lambda x, matrix, **_: [jnp.matmul(x, matrix)],
)
