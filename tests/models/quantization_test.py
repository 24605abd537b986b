"""Packed int4 against a NumPy reading of the format, nibble by nibble."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quick_compile

from ddtree_jax.models import quantization

# Each as one program, where every operation of its own would be compiled.
pack = quick_compile.jit(quantization.pack)
unpack = quick_compile.jit(quantization.unpack)
quantize = quick_compile.jit(quantization.quantize)
dequantize = quick_compile.jit(quantization.dequantize, static_argnums=2)


def _unpack(words):
    """The format as compressed-tensors states it: element i of a word in bits 4i .. 4i + 3, plus 8."""
    out = np.zeros((*words.shape[:-1], words.shape[-1] * 8), int)
    for position in np.ndindex(words.shape):
        word = int(words[position]) & 0xFFFFFFFF
        for i in range(8):
            out[(*position[:-1], position[-1] * 8 + i)] = (word >> (4 * i) & 0xF) - 8
    return out


def test_pack_and_unpack(rng):
    values = rng.integers(-8, 8, (3, 5, 64)).astype(np.int8)
    words = pack(jnp.asarray(values))
    assert words.dtype == jnp.int32 and words.shape == (3, 5, 8)
    np.testing.assert_array_equal(_unpack(np.asarray(words)), values)
    np.testing.assert_array_equal(unpack(words), values)


def test_the_first_number_is_the_lowest_nibble():
    words = pack(jnp.asarray([[-8, 0, 0, 0, 0, 0, 0, 7]], jnp.int8))
    assert int(words[0, 0]) & 0xFFFFFFFF == 0xF8888880


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_dequantize(rng, dtype):
    words = rng.integers(-(2**31), 2**31, (4, 12)).astype(np.int32)
    scale = rng.normal(0, 0.1, (4, 3)).astype(ml_dtypes.bfloat16)
    got = dequantize(jnp.asarray(words), jnp.asarray(scale), dtype)
    want = _unpack(words) * np.repeat(scale.astype(np.float32), 32, axis=1)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want.astype(dtype))


def test_quantize_rounds_to_the_nearest_step(rng):
    weight = rng.normal(0, 1, (6, 96)).astype(np.float32)
    weight[2, 32:64] = 0
    values, scale = quantize(jnp.asarray(weight))
    assert scale.dtype == jnp.bfloat16 and scale.shape == (6, 3)
    assert np.asarray(values).min() >= -7 and np.asarray(values).max() <= 7
    step = np.repeat(np.asarray(scale, np.float32), 32, axis=1)
    # The scale itself is rounded to bfloat16, so the largest number may be clipped by that much.
    error = np.abs(np.asarray(values) * step - weight)
    assert np.all(error <= step * 0.5 + np.abs(weight) * 2**-8)
    assert not np.any(np.asarray(values)[2, 32:64])


def test_quantizing_twice_changes_nothing(rng):
    weight = jnp.asarray(rng.normal(0, 1, (4, 64)), jnp.float32)
    values, scale = quantize(weight)
    grid = dequantize(pack(values), scale, jnp.float32)
    again, scale_again = quantize(grid)
    regrid = dequantize(pack(again), scale_again, jnp.float32)
    np.testing.assert_allclose(regrid, grid, rtol=2**-7)


def test_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 32, not 40"):
        quantize(jnp.zeros((2, 40)))
    with pytest.raises(ValueError, match="multiple of 8, not 12"):
        pack(jnp.zeros((2, 12), jnp.int8))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1, 32), (64, 256), (2, 64, 256)])
def test_a_group_with_a_number_that_is_not_finite_shows_it(rng, shape, broken):
    """By XLA's default options, whose maximum over many numbers drops a NaN on a CPU."""
    weight = rng.normal(0, 1, shape).astype(np.float32)
    at = tuple(rng.integers(0, size) for size in shape)
    weight[at] = broken
    values, scale = jax.jit(quantization.quantize)(jnp.asarray(weight))
    got = np.asarray(dequantize(pack(values), scale, np.float32))
    group = np.zeros(shape, bool)
    group[*at[:-1], at[-1] // 32 * 32 : at[-1] // 32 * 32 + 32] = True
    np.testing.assert_array_equal(np.isfinite(got), ~group)
