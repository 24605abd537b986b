"""Products of a few rows: the kernel against float64, and where it stands back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import _ffi, few_rows
from ddtree_jax.few_rows import few_rows_dot

needs_kernel = pytest.mark.skipif(not few_rows._on_one_cpu(), reason="no AVX-512, or no CPU alone")


def _operands(rng, rows, inputs, outputs, dtype=np.float32):
    x = rng.normal(size=(rows, inputs)).astype(dtype)
    return x, rng.normal(size=(inputs, outputs)).astype(dtype)


def _uses_kernel(function, *operands) -> bool:
    return "few_rows_dot" in str(jax.make_jaxpr(function)(*operands))


# Whole tiles and odd ends, one tile and many, one block of rows and several, one thread's work and two's.
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 10, 17, 19, 40])
@pytest.mark.parametrize("inputs, outputs", [(1, 16), (7, 48), (129, 80), (384, 768), (256, 2288)])
def test_equals_float64(rng, rows, inputs, outputs):
    x, matrix = _operands(rng, rows, inputs, outputs)
    got = np.asarray(jax.jit(few_rows_dot)(x, matrix), np.float64)
    want = x.astype(np.float64) @ matrix.astype(np.float64)
    # The bound on a float32 sum in any order.
    bound = np.abs(x).astype(np.float64) @ np.abs(matrix).astype(np.float64)
    assert np.all(np.abs(got - want) <= inputs * 2.0**-24 * bound)


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
    assert rows > 40 or _uses_kernel(few_rows_dot, x, matrix) == few_rows.reads_bfloat16()


# Stacks whose tiles do and do not fill a thread's share.
@pytest.mark.parametrize(
    "batch, rows, inputs, outputs", [(2, 9, 64, 512), (3, 4, 7, 80), (16, 1, 33, 16)]
)
def test_a_stack_equals_float64(rng, batch, rows, inputs, outputs):
    x = rng.normal(size=(batch, rows, inputs)).astype(np.float32)
    matrix = rng.normal(size=(batch, inputs, outputs)).astype(np.float32)
    assert _uses_kernel(few_rows_dot, x, matrix) == few_rows._on_one_cpu()
    got = np.asarray(jax.jit(few_rows_dot)(x, matrix), np.float64)
    want = np.einsum("bri,bio->bro", x.astype(np.float64), matrix.astype(np.float64))
    bound = np.einsum(
        "bri,bio->bro", np.abs(x).astype(np.float64), np.abs(matrix).astype(np.float64)
    )
    assert np.all(np.abs(got - want) <= inputs * 2.0**-24 * bound)


@needs_kernel
def test_a_row_does_not_depend_on_the_others(rng):
    x, matrix = _operands(rng, 40, 96, 176)
    together = np.asarray(few_rows_dot(x, matrix))
    for rows in (1, 2, 7, 8, 13, 27):
        np.testing.assert_array_equal(few_rows_dot(x[:rows], matrix), together[:rows])
    poisoned = x.copy()
    poisoned[5] = np.nan
    others = np.arange(40) != 5
    np.testing.assert_array_equal(
        np.asarray(few_rows_dot(poisoned, matrix))[others], together[others]
    )


@needs_kernel
def test_a_row_of_a_stack_does_not_depend_on_the_others(rng):
    x = rng.normal(size=(3, 17, 48)).astype(np.float32)
    matrix = rng.normal(size=(3, 48, 96)).astype(np.float32)
    together = np.asarray(few_rows_dot(x, matrix))
    for rows in (1, 5, 9, 16):
        np.testing.assert_array_equal(few_rows_dot(x[:, :rows], matrix), together[:, :rows])
    for one, kernel, want in zip(x, matrix, together, strict=True):
        np.testing.assert_array_equal(few_rows_dot(one, kernel), want)


@needs_kernel
def test_gradients_and_vmap_of_a_stack(rng):
    x = rng.normal(size=(2, 3, 6, 40)).astype(np.float32)
    matrix = rng.normal(size=(3, 40, 32)).astype(np.float32)
    want = np.einsum("nbri,bio->nbro", x, matrix)
    got = jax.vmap(few_rows_dot, (0, None))(x, matrix)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    each = jax.vmap(few_rows_dot)(x, np.stack([matrix, 2 * matrix]))
    np.testing.assert_allclose(
        each, want * np.float32([1, 2])[:, None, None, None], rtol=1e-5, atol=1e-5
    )
    cotangent = rng.normal(size=want[0].shape).astype(np.float32)
    of_x, of_matrix = jax.vjp(few_rows_dot, x[0], matrix)[1](cotangent)
    np.testing.assert_allclose(
        of_x, np.einsum("bro,bio->bri", cotangent, matrix), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        of_matrix, np.einsum("bri,bro->bio", x[0], cotangent), rtol=1e-5, atol=1e-5
    )


@needs_kernel
def test_where_the_kernel_serves(rng):
    for rows, serves in ((0, False), (1, True), (40, True), (41, False)):
        assert _uses_kernel(few_rows_dot, *_operands(rng, rows, 32, 32)) == serves
    assert not _uses_kernel(few_rows_dot, *_operands(rng, 8, 32, 24))
    assert not _uses_kernel(few_rows_dot, *_operands(rng, 8, 32, 32, jnp.bfloat16))
    x, matrix = _operands(rng, 8, 32, 32)
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
def test_leading_axes_gradients_and_vmap(rng):
    x, matrix = _operands(rng, 12, 40, 32)
    want = few_rows_dot(x, matrix)
    np.testing.assert_array_equal(few_rows_dot(x.reshape(3, 4, 40), matrix).reshape(12, 32), want)
    np.testing.assert_array_equal(
        jax.vmap(few_rows_dot, (0, None))(x.reshape(3, 4, 40), matrix).reshape(12, 32), want
    )
    both = jax.vmap(few_rows_dot, (None, 2))(x, np.stack([matrix, 2 * matrix], axis=2))
    np.testing.assert_allclose(both, np.stack([want, 2 * want]), rtol=1e-5, atol=1e-5)
    cotangent = rng.normal(size=want.shape).astype(np.float32)
    got = jax.vjp(few_rows_dot, x, matrix)[1](cotangent)
    for one, expected in zip(got, (cotangent @ matrix.T, x.T @ cotangent), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_a_vmap_over_many_rows_is_xlas(rng):
    x, matrix = _operands(rng, 60, 40, 32)
    mapped = jax.vmap(few_rows_dot, (0, None))
    assert _uses_kernel(mapped, x[:40].reshape(10, 4, 40), matrix)
    assert not _uses_kernel(mapped, x.reshape(15, 4, 40), matrix)
    assert not _uses_kernel(jax.vmap(mapped, (0, None)), x.reshape(5, 3, 4, 40), matrix)
    got = mapped(x.reshape(15, 4, 40), matrix).reshape(60, 32)
    np.testing.assert_allclose(got, x @ matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 41])
def test_another_dtype_is_given_whatever_the_rows(rng, rows):
    x, matrix = _operands(rng, rows, 32, 32)
    got = few_rows_dot(x, matrix, preferred_element_type=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), x @ matrix, rtol=2.0**-6, atol=2.0**-6)


def test_float32_is_what_bfloat16_may_prefer(rng):
    x, matrix = _operands(rng, 8, 32, 32, jnp.bfloat16)
    assert few_rows_dot(x, matrix).dtype == jnp.bfloat16
    assert few_rows_dot(x, matrix, preferred_element_type=jnp.float32).dtype == jnp.float32


@needs_kernel
@pytest.mark.parametrize(
    "shapes, dtype",
    [
        ([(1, 4, 8), (1, 9, 16), (1, 4, 16)], np.float32),
        ([(1, 4, 8), (1, 8, 24), (1, 4, 24)], np.float32),
        ([(1, 4, 8), (1, 8, 16), (1, 5, 16)], np.float32),
        ([(1, 4, 8), (2, 8, 16), (1, 4, 16)], np.float32),
        ([(1, 4, 8), (1, 8, 16), (1, 4, 16)], np.float16),
        ([(4, 8), (8, 16), (4, 16)], np.float32),
    ],
)
def test_buffers_that_do_not_fit_are_refused(shapes, dtype):
    assert "ddtree_few_rows_dot" in _ffi.cpu.registrations()
    x, matrix, out = shapes
    call = jax.ffi.ffi_call("ddtree_few_rows_dot", jax.ShapeDtypeStruct(out, dtype))
    with pytest.raises(Exception, match="ddtree_few_rows_dot"):
        jax.block_until_ready(jax.jit(call)(jnp.zeros(x, dtype), jnp.zeros(matrix, dtype)))
