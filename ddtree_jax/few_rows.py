"""The product of a few rows with a matrix on a CPU: what a decode step mostly consists of."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ddtree_jax import _ffi
from ddtree_jax._primitive import kernel_primitive

_MOST = 40  # rows: more are worth the packing that XLA does first
# XLA would widen a bfloat16 matrix before it packs it, at every product: the rows of a chunk are not worth that.
_MOST_BFLOAT16 = 320
_LANES = 16


def few_rows_dot(
    x: jax.Array, matrix: jax.Array, *, precision=None, preferred_element_type=None
) -> jax.Array:
    """x @ matrix, by a kernel of its own where one serves.

    It serves float32 rows on a CPU with AVX-512, up to 40 of them, or 320 where the matrix is bfloat16.

    XLA's CPU backend packs the whole matrix first, for 8 rows as for 800, and on one core alone, where two cores
    can stream it once (docs/kernels/few_rows_dot.md). A bfloat16 matrix is upcast on the way, or AMX multiplies it by
    the three bfloat16 values that x is the sum of: the result is as exact as that of the float32 matrix.

    Args:
      x: [..., inputs], or [batch, rows, inputs] for a stack of matrices.
      matrix: [inputs, outputs], or [batch, inputs, outputs].
      precision, preferred_element_type: as `jnp.matmul` takes them; the kernel is float32 throughout.

    Returns:
      [..., outputs]. The kernel's sums have an order of their own, so that no row depends on how many there are.
    """
    stacked = matrix.ndim == 3
    rows = x.shape[1] if stacked and x.ndim == 3 else math.prod(x.shape[:-1])
    # What does not fit is jnp.matmul's to refuse, before anything runs.
    serves = x.ndim > 0 and matrix.ndim in (2, 3) and x.shape[-1] == matrix.shape[-2] > 0
    serves = serves and (not stacked or (x.ndim == 3 and x.shape[0] == matrix.shape[0] > 0))
    serves = serves and x.dtype == jnp.float32 and matrix.dtype in (jnp.float32, jnp.bfloat16)
    serves = serves and matrix.shape[-1] % _LANES == 0
    serves = serves and preferred_element_type in (None, jnp.float32)
    most = _MOST_BFLOAT16 if matrix.dtype == jnp.bfloat16 else _MOST
    if not (serves and 0 < rows <= most and on_one_cpu()):
        return jnp.matmul(
            x, matrix, precision=precision, preferred_element_type=preferred_element_type
        )
    if stacked:
        return _dot(x, matrix)
    return _dot(x.reshape(1, rows, -1), matrix[None]).reshape(*x.shape[:-1], matrix.shape[1])


@functools.cache
def on_one_cpu() -> bool:
    """Whether the kernel can run here; else XLA widens a bfloat16 matrix at every product with float32 rows.

    On a mesh XLA splits its own products, but no custom call.
    """
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
    lambda x, matrix, **_: [jax.ShapeDtypeStruct((*x.shape[:2], matrix.shape[2]), x.dtype)],
    batch_axes=(1, None),
    result_batch_axes=(1,),
    # Programs traced here are lowered for CUDA too, to look at them.
    plain={"cuda": ("kernel", lambda x, matrix: [x @ matrix])},
    unshared=lambda x, matrix, **_: [jnp.matmul(x, matrix)],
    largest_batch=_MOST,
)
