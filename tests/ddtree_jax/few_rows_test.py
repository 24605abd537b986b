"""Products of a few rows: the kernel against float64, and where it stands back."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import _ffi, few_rows
from ddtree_jax.few_rows import few_rows_dot

needs_kernel = pytest.mark.skipif(not few_rows.on_one_cpu(), reason="no AVX-512, or no CPU alone")


both_matrices = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])


def _operands(rng, rows, inputs, outputs, dtype=np.float32, x_dtype=np.float32):
    x = rng.normal(size=(rows, inputs)).astype(x_dtype)
    return x, rng.normal(size=(inputs, outputs)).astype(dtype)


def _uses_kernel(function, *operands) -> bool:
    return "few_rows_dot" in str(jax.make_jaxpr(function)(*operands))


def _assert_as_float32(got, x, matrix):
    """Asserts what bounds a float32 sum in any order, and what flushing subnormal numbers may add."""
    assert got.dtype == np.float32
    x, w = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    inputs = x.shape[-1]
    # Three sums, of a bfloat16 matrix, are two roundings more than one of one product less each.
    roundings = inputs + (matrix.dtype == jnp.bfloat16)
    flushed = 2.0**-123 * ((abs(x) + 1).sum(-1)[..., None] + abs(w).sum(-2)[..., None, :])
    bound = roundings * 2.0**-24 * (abs(x) @ abs(w)) + flushed
    assert np.all(abs(np.asarray(got, np.float64) - x @ w) <= bound)


# Whole tiles and odd ends, one tile and many, one block of rows and several, one thread's work and two's.
@both_matrices
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 10, 17, 19, 40])
@pytest.mark.parametrize("inputs, outputs", [(1, 16), (7, 48), (129, 80), (384, 768), (256, 2288)])
def test_equals_float64(rng, rows, inputs, outputs, dtype):
    x, matrix = _operands(rng, rows, inputs, outputs, dtype)
    assert _uses_kernel(few_rows_dot, x, matrix) == few_rows.on_one_cpu()
    _assert_as_float32(jax.jit(few_rows_dot)(x, matrix), x, matrix)


@pytest.mark.parametrize("rows", [1, 9, 41])
def test_float32_rows_by_a_bfloat16_matrix_are_float32_s(rng, rows):
    """Whoever multiplies them."""
    x, matrix = _operands(rng, rows, 129, 80)
    matrix = jnp.asarray(matrix, jnp.bfloat16)
    got = jax.jit(few_rows_dot)(x, matrix)
    assert got.dtype == jnp.float32
    wide = np.asarray(matrix, np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(wide)
    error = np.abs(np.asarray(got, np.float64) - x.astype(np.float64) @ wide)
    assert np.all(error <= 129 * 2.0**-24 * bound)
    assert rows > 40 or _uses_kernel(few_rows_dot, x, matrix) == few_rows.on_one_cpu()


# Stacks whose tiles do and do not fill a thread's share.
@both_matrices
@pytest.mark.parametrize(
    "batch, rows, inputs, outputs", [(2, 9, 64, 512), (3, 4, 7, 80), (16, 1, 33, 16)]
)
def test_a_stack_equals_float64(rng, batch, rows, inputs, outputs, dtype):
    x = rng.normal(size=(batch, rows, inputs)).astype(np.float32)
    matrix = rng.normal(size=(batch, inputs, outputs)).astype(dtype)
    assert _uses_kernel(few_rows_dot, x, matrix) == few_rows.on_one_cpu()
    _assert_as_float32(jax.jit(few_rows_dot)(x, matrix), x, matrix)


@needs_kernel
@both_matrices
def test_a_row_does_not_depend_on_the_others(rng, dtype):
    x, matrix = _operands(rng, 40, 97, 176, dtype)
    together = np.asarray(few_rows_dot(x, matrix))
    for rows in range(1, 40):
        np.testing.assert_array_equal(few_rows_dot(x[:rows], matrix), together[:rows])
        np.testing.assert_array_equal(few_rows_dot(x[rows:], matrix), together[rows:])
    poisoned = x.copy()
    poisoned[5], poisoned[17], poisoned[18] = np.nan, np.inf, np.finfo(np.float32).max
    others = ~np.isin(np.arange(40), (5, 17, 18))
    np.testing.assert_array_equal(
        np.asarray(few_rows_dot(poisoned, matrix))[others], together[others]
    )


_EXTREMES = np.array(
    [0, -0.0, 1, -1, 1 + 2.0**-23, 255 / 256, 1e30, 1e-30, 2.0**-110, 3e-36, 1e-38, 1e-40, 1e-45],
    np.float32,
)


@needs_kernel
@both_matrices
def test_numbers_of_any_size(rng, dtype):
    x, matrix = _operands(rng, 16, 45, 48, dtype)
    x *= rng.choice(_EXTREMES, (16, 1))
    x[rng.random(x.shape) < 0.1] = rng.choice(_EXTREMES)
    matrix[:, 7] *= 1e-30
    matrix[:, 8] *= 1e-38
    _assert_as_float32(few_rows_dot(x, matrix), x, matrix)
    largest = np.zeros_like(x)
    largest[np.arange(16), rng.integers(45, size=16)] = np.finfo(np.float32).max
    matrix = (matrix.astype(np.float32) % 1).astype(dtype)  # at most 1
    _assert_as_float32(few_rows_dot(largest, matrix), largest, matrix)


@needs_kernel
@both_matrices
def test_infinite_and_no_numbers(rng, dtype):
    x, matrix = _operands(rng, 11, 45, 48, dtype)
    x[1, 4], x[2, 44], x[3, 7], x[5, [0, 1]] = np.inf, -np.inf, np.nan, (np.inf, -np.inf)
    x.view(np.uint32)[6, 9] = 0x7F800001  # a NaN of which the upper half alone is an infinity
    matrix[:2] = abs(matrix[:2])
    x[7, :2], matrix[:2, 3] = (
        np.finfo(np.float32).max / 16,
        16,
    )  # products are finite, not their sum
    x[8, 30] = 0
    matrix[4, 20], matrix[30, 40], matrix[20, 47] = 0, np.inf, np.nan
    with np.errstate(all="ignore"):
        want = np.zeros((11, 48), np.float32)
        for k in range(45):
            want += x[:, k, None] * matrix[k].astype(np.float32)
    got = np.asarray(few_rows_dot(x, matrix))
    assert np.isnan(want).any() and np.isposinf(want).any() and np.isneginf(want).any()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(
        np.where(np.isinf(got), got, 0), np.where(np.isinf(want), want, 0)
    )
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-4, atol=1e-4)


_PRINT_PRODUCTS = """
import sys
import numpy as np
from ddtree_jax.few_rows import few_rows_dot
operands = np.load(sys.argv[1])
matrix = (operands["matrix"].astype(np.uint32) << 16).view(np.float32)
few = few_rows_dot(operands["x"], matrix.astype("bfloat16"))
np.savez(sys.argv[2], bfloat16=few, float32=few_rows_dot(operands["x"], matrix))
"""


@needs_kernel
def test_other_processors_and_fewer_threads(rng, tmp_path):
    """Without AMX a bfloat16 matrix gives what the same one in float32 does; threads change nothing."""
    x, matrix = _operands(rng, 19, 385, 784, jnp.bfloat16)
    np.savez(tmp_path / "operands.npz", x=x, matrix=matrix.view(np.uint16))

    def products(**environment):
        command = [
            sys.executable,
            "-c",
            _PRINT_PRODUCTS,
            tmp_path / "operands.npz",
            tmp_path / "products.npz",
        ]
        # Elsewhere than in the source folder, which an install that is not editable must not meet.
        subprocess.run(command, env=os.environ | environment, cwd=tmp_path, check=True)
        with np.load(tmp_path / "products.npz") as found:
            return found["bfloat16"], found["float32"]

    without, of_float32 = products(DDTREE_CPU_AMX="0")
    np.testing.assert_array_equal(without, of_float32)
    np.testing.assert_array_equal(of_float32, few_rows_dot(x, matrix.astype(np.float32)))
    alone, of_float32_alone = products(DDTREE_CPU_THREADS="1")
    np.testing.assert_array_equal(alone, few_rows_dot(x, matrix))
    np.testing.assert_array_equal(of_float32_alone, of_float32)


@needs_kernel
@both_matrices
def test_a_row_of_a_stack_does_not_depend_on_the_others(rng, dtype):
    x = rng.normal(size=(3, 17, 48)).astype(np.float32)
    matrix = rng.normal(size=(3, 48, 96)).astype(dtype)
    together = np.asarray(few_rows_dot(x, matrix))
    for rows in (1, 5, 9, 16):
        np.testing.assert_array_equal(few_rows_dot(x[:, :rows], matrix), together[:, :rows])
    for one, kernel, want in zip(x, matrix, together, strict=True):
        np.testing.assert_array_equal(few_rows_dot(one, kernel), want)


def _assert_gradient(got, want, dtype):
    assert got.dtype == dtype
    close = 1e-5 if dtype == np.float32 else 2.0**-8
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=close, atol=1e-5)


@needs_kernel
@both_matrices
def test_gradients_and_vmap_of_a_stack(rng, dtype):
    x = rng.normal(size=(2, 3, 6, 40)).astype(np.float32)
    matrix = rng.normal(size=(3, 40, 32)).astype(dtype)
    want = np.einsum("nbri,bio->nbro", x, matrix.astype(np.float32))
    got = jax.vmap(few_rows_dot, (0, None))(x, matrix)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    each = jax.vmap(few_rows_dot)(x, np.stack([matrix, 2 * matrix]))
    np.testing.assert_allclose(
        each, want * np.float32([1, 2])[:, None, None, None], rtol=1e-5, atol=1e-5
    )
    cotangent = rng.normal(size=want[0].shape).astype(np.float32)
    of_x, of_matrix = jax.vjp(few_rows_dot, x[0], matrix)[1](cotangent)
    of_x_wanted = np.einsum("bro,bio->bri", cotangent, matrix.astype(np.float32))
    _assert_gradient(of_x, of_x_wanted, np.float32)
    _assert_gradient(of_matrix, np.einsum("bri,bro->bio", x[0], cotangent), dtype)


@needs_kernel
def test_where_the_kernel_serves(rng):
    for rows, serves in ((0, False), (1, True), (40, True), (41, False)):
        assert _uses_kernel(few_rows_dot, *_operands(rng, rows, 32, 32)) == serves
    assert not _uses_kernel(few_rows_dot, *_operands(rng, 8, 32, 24))
    for dtype, x_dtype in (
        (jnp.bfloat16, jnp.bfloat16),
        (np.float32, jnp.bfloat16),
        (np.float16, np.float32),
    ):
        assert not _uses_kernel(few_rows_dot, *_operands(rng, 8, 32, 32, dtype, x_dtype))
    for dtype in (np.float32, jnp.bfloat16):
        x, matrix = _operands(rng, 8, 32, 32, dtype)
        text = jax.jit(few_rows_dot).trace(x, matrix).lower(lowering_platforms=("cuda",)).as_text()
        assert "few_rows_dot" not in text.replace("jit_few_rows_dot", "")


def test_what_does_not_fit_is_refused_before_it_runs(rng):
    x, matrix = _operands(rng, 8, 32, 32)
    with pytest.raises(TypeError, match="contracting"):
        jax.eval_shape(few_rows_dot, x[:, :16], matrix)
    np.testing.assert_array_equal(few_rows_dot(x[:, :0], matrix[:0]), np.zeros((8, 32)))
    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(few_rows_dot, np.stack([x, x]), np.stack([matrix, matrix, matrix]))
    pair = np.stack([matrix, matrix])
    assert few_rows_dot(x[None], pair).shape == (2, 8, 32)  # as jnp.matmul has it


@needs_kernel
@both_matrices
def test_leading_axes_gradients_and_vmap(rng, dtype):
    x, matrix = _operands(rng, 12, 40, 32, dtype)
    want = few_rows_dot(x, matrix)
    np.testing.assert_array_equal(few_rows_dot(x.reshape(3, 4, 40), matrix).reshape(12, 32), want)
    np.testing.assert_array_equal(
        jax.vmap(few_rows_dot, (0, None))(x.reshape(3, 4, 40), matrix).reshape(12, 32), want
    )
    both = jax.vmap(few_rows_dot, (None, 2))(x, np.stack([matrix, 2 * matrix], axis=2))
    np.testing.assert_allclose(both, np.stack([want, 2 * want]), rtol=1e-5, atol=1e-5)
    cotangent = rng.normal(size=want.shape).astype(np.float32)
    of_x, of_matrix = jax.vjp(few_rows_dot, x, matrix)[1](cotangent)
    _assert_gradient(of_x, cotangent @ matrix.astype(np.float32).T, np.float32)
    _assert_gradient(of_matrix, x.T @ cotangent, dtype)
    tangents = few_rows_dot(2 * x, matrix) + few_rows_dot(x, matrix)
    got = jax.jvp(few_rows_dot, (x, matrix), (2 * x, matrix))[1]
    _assert_gradient(got, tangents, np.float32)


@needs_kernel
@both_matrices
def test_a_vmap_over_many_rows_is_xlas(rng, dtype):
    x, matrix = _operands(rng, 60, 40, 32, dtype)
    mapped = jax.vmap(few_rows_dot, (0, None))
    assert _uses_kernel(mapped, x[:40].reshape(10, 4, 40), matrix)
    assert not _uses_kernel(mapped, x.reshape(15, 4, 40), matrix)
    assert not _uses_kernel(jax.vmap(mapped, (0, None)), x.reshape(5, 3, 4, 40), matrix)
    got = mapped(x.reshape(15, 4, 40), matrix).reshape(60, 32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x @ matrix.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 41])
def test_another_dtype_is_given_whatever_the_rows(rng, rows):
    x, matrix = _operands(rng, rows, 32, 32)
    got = few_rows_dot(x, matrix, preferred_element_type=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), x @ matrix, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("rows, outputs", [(3, 32), (3, 24), (41, 32)])
def test_a_bfloat16_matrix_leaves_float32(rng, rows, outputs):
    x, matrix = _operands(rng, rows, 32, outputs, jnp.bfloat16)
    for preferred in (None, jnp.float32):
        got = few_rows_dot(x, matrix, preferred_element_type=preferred)
        _assert_as_float32(got, x, matrix)


def test_float32_is_what_bfloat16_may_prefer(rng):
    x, matrix = _operands(rng, 8, 32, 32, jnp.bfloat16, jnp.bfloat16)
    assert few_rows_dot(x, matrix).dtype == jnp.bfloat16
    assert few_rows_dot(x, matrix, preferred_element_type=jnp.float32).dtype == jnp.float32


@needs_kernel
@pytest.mark.parametrize(
    "shapes, dtype, matrix_dtype",
    [
        ([(1, 4, 8), (1, 9, 16), (1, 4, 16)], np.float32, np.float32),
        ([(1, 4, 8), (1, 8, 24), (1, 4, 24)], np.float32, np.float32),
        ([(1, 4, 8), (1, 8, 24), (1, 4, 24)], np.float32, jnp.bfloat16),
        ([(1, 4, 8), (1, 8, 16), (1, 5, 16)], np.float32, np.float32),
        ([(1, 4, 8), (2, 8, 16), (1, 4, 16)], np.float32, np.float32),
        ([(1, 4, 8), (1, 8, 16), (1, 4, 16)], np.float16, np.float16),
        ([(1, 4, 8), (1, 8, 16), (1, 4, 16)], np.float32, np.float16),
        ([(1, 4, 8), (1, 8, 16), (1, 4, 16)], jnp.bfloat16, jnp.bfloat16),
        ([(4, 8), (8, 16), (4, 16)], np.float32, np.float32),
    ],
)
def test_buffers_that_do_not_fit_are_refused(shapes, dtype, matrix_dtype):
    assert "ddtree_few_rows_dot" in _ffi.cpu.registrations()
    x, matrix, out = shapes
    call = jax.ffi.ffi_call("ddtree_few_rows_dot", jax.ShapeDtypeStruct(out, dtype))
    with pytest.raises(Exception, match="ddtree_few_rows_dot|Wrong buffer (rank|dtype): expected"):
        jax.block_until_ready(jax.jit(call)(jnp.zeros(x, dtype), jnp.zeros(matrix, matrix_dtype)))


@needs_kernel
@pytest.mark.parametrize("rows", [41, 80, 257, 320, 321])
def test_many_rows_of_a_bfloat16_matrix(rng, rows):
    """A batch's or a chunk's: the kernel's as well, since XLA would widen the matrix first."""
    x, matrix = _operands(rng, rows, 129, 80, jnp.bfloat16)
    assert _uses_kernel(few_rows_dot, x, matrix) == (rows <= 320)
    got = jax.jit(few_rows_dot)(x, matrix)
    _assert_as_float32(got, x, matrix)
    if rows <= 320:
        np.testing.assert_array_equal(got[:5], few_rows_dot(x[:5], matrix))
        np.testing.assert_array_equal(got[-1:], few_rows_dot(x[-1:], matrix))


@needs_kernel
@both_matrices
def test_a_call_without_rows(dtype):
    """The handler's own: Python leaves it to jnp.matmul."""
    x, matrix = jnp.zeros((1, 0, 32), jnp.float32), jnp.ones((1, 32, 16), dtype)
    out = few_rows._few_rows_dot.bind(x, matrix, kernel=False)[0]
    assert out.shape == (1, 0, 16)
