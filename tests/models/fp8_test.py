"""Weights in fp8 blocks: the arithmetic against torch's, and folders in which something is wrong."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp8_folder import random_tensors, write
from published_configs import FP8, toy
from tiny_models import TARGET

from ddtree_jax.models import KimiK26Config, fp8, load_target, save_target
from ddtree_jax.models.footprint import footprint

torch = pytest.importorskip("torch", reason="torch is not installed: no outside reference")
_WEIGHT = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
_EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def _by_torch(values, scales):
    scales = torch.tensor(scales)
    for axis, size in ((-2, values.shape[-2]), (-1, values.shape[-1])):
        scales = scales.repeat_interleave(128, axis).narrow(axis, 0, size)
    return (torch.tensor(values.view(np.uint8)).view(torch.float8_e4m3fn).float() * scales).numpy()


@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 300), (3, 200, 127)])
def test_dequantize(rng, shape):
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[codes % 128 == 127] = 0  # the two NaN
    values = codes.view(ml_dtypes.float8_e4m3fn)
    grid = (*shape[:-2], fp8.blocks(shape[-2]), fp8.blocks(shape[-1]))
    scales = rng.normal(0, 1e-3, grid).astype(np.float32)
    want = _by_torch(values, scales)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        host = fp8.dequantize(values, scales, dtype)
        assert isinstance(host, np.ndarray) and host.dtype == dtype
        np.testing.assert_array_equal(host, want.astype(dtype))
        device = fp8.dequantize(jnp.asarray(values), jnp.asarray(scales), dtype)
        np.testing.assert_array_equal(device, want.astype(dtype))


def test_quantize_rounds_to_the_nearest_value(rng):
    weight = rng.normal(0, 1, (2, 150, 260)).astype(np.float32)
    weight[:, :128, 128:256] = 0
    values, scales = map(np.asarray, fp8.quantize(jnp.asarray(weight)))
    assert values.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (2, 2, 3)
    np.testing.assert_allclose(
        scales[0, 0, 0] * 448, np.abs(weight[0, :128, :128]).max(), rtol=1e-6
    )
    error = np.abs(_by_torch(values, scales) - weight)
    # Three bits behind the leading one, and subnormal steps of 2^-9 of a scale.
    assert np.all(error <= np.abs(weight) * 2**-4 * 1.001 + scales.max() * 2**-10 * 1.001)


@pytest.fixture
def made(rng):
    """config.json and random tensors of a small K2-Instruct of two layers."""
    config = {**toy("K2-Instruct"), "num_hidden_layers": 2}
    return config, random_tensors(rng, config)


def test_what_is_loaded_and_how_it_is_held(made, tmp_path):
    config, tensors = made
    write(tmp_path, config, tensors)
    target = load_target(tmp_path)
    layer = target.layers[1]
    assert target.config.experts == "fp8" and target.dtype == jnp.bfloat16
    scales = tensors[f"{_WEIGHT}_scale_inv"]
    codes = tensors[_WEIGHT]
    got = layer.self_attn.kv_a_proj_with_mqa.kernel
    np.testing.assert_array_equal(got, _by_torch(codes, scales).T.astype(ml_dtypes.bfloat16))
    experts = layer.mlp.experts
    assert experts.gate_up_fp8.dtype == jnp.float8_e4m3fn and experts.gate_up_fp8.shape == (
        6,
        320,
        160,
    )
    assert experts.gate_up_scale_inv.shape == (6, 4, 2)
    scales = tensors[f"{_EXPERT}_scale_inv"]
    codes = tensors[_EXPERT]
    np.testing.assert_array_equal(
        experts.weights(3, jnp.float32)[0][160:], _by_torch(codes, scales)
    )
    # A linear layer may be left out of the quantization.
    plain = {n: t for n, t in tensors.items() if n != f"{_WEIGHT}_scale_inv"}
    write(tmp_path, config, {**plain, _WEIGHT: tensors[_WEIGHT].astype(ml_dtypes.bfloat16)})
    got = load_target(tmp_path).layers[1].self_attn.kv_a_proj_with_mqa.kernel
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), tensors[_WEIGHT].astype(np.float32).T
    )
    size = footprint(tmp_path)
    assert size.experts + size.rest == sum(x.nbytes for x in jax.tree.leaves(target))
    with pytest.raises(ValueError, match="experts in fp8 are not written in int4"):
        save_target(target, tmp_path / "again")


@pytest.mark.parametrize("name", [_WEIGHT, _EXPERT])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: None, "weight_scale_inv' is missing"),
        (lambda s: s[:-1].copy(), r"weight_scale_inv' has shape \(\d, 2\).*makes it \(\d, 2\)"),
        (
            lambda s: s.astype(ml_dtypes.bfloat16),
            "weight_scale_inv' is BF16, but supported here is F32",
        ),
        (lambda s: np.full_like(s, np.nan), "weight_scale_inv' holds NaN or inf"),
        (lambda s: np.full_like(s, np.inf), "weight_scale_inv' holds NaN or inf"),
    ],
)
def test_scales_that_do_not_fit_are_named(made, tmp_path, name, change, message):
    config, tensors = made
    scales = change(tensors[f"{name}_scale_inv"])
    changed = {n: t for n, t in tensors.items() if n != f"{name}_scale_inv"}
    if scales is not None:
        changed[f"{name}_scale_inv"] = scales
    write(tmp_path, config, changed)
    with pytest.raises(ValueError, match=message) as error:
        load_target(tmp_path)
    assert name in str(error.value) and str(tmp_path) in str(error.value)


def test_weights_that_do_not_fit_are_named(made, tmp_path):
    config, tensors = made
    write(tmp_path, config, {**tensors, _EXPERT: tensors[_EXPERT].astype(ml_dtypes.bfloat16)})
    with pytest.raises(ValueError, match="up_proj.weight' is BF16, but supported here is F8_E4M3"):
        load_target(tmp_path)
    write(tmp_path, config, {**tensors, _WEIGHT: tensors[_WEIGHT].astype(ml_dtypes.bfloat16)})
    with pytest.raises(ValueError, match="1 tensors have no place.*weight_scale_inv"):
        load_target(tmp_path)
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    write(tmp_path, plain, tensors)
    with pytest.raises(ValueError, match="is F8_E4M3, but supported here is BF16 or F32 or F16"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    "key, value, served",
    [
        ("fmt", "e5m2", "'e4m3'"),
        ("weight_block_size", [64, 64], r"\[128, 128\]"),
        ("weight_block_size", None, r"\[128, 128\]"),
        ("activation_scheme", "static", "'dynamic'"),
    ],
)
def test_other_fp8_is_refused(key, value, served):
    assert KimiK26Config.from_json({**TARGET, "quantization_config": FP8}).experts == "fp8"
    message = f"quantization_config.{key} is .*, but only {served} is supported"
    with pytest.raises(ValueError, match=message):
        KimiK26Config.from_json({**TARGET, "quantization_config": {**FP8, key: value}})
