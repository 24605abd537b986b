"""Folders with tensors of another form than usual: they load with the right values, or say what they are."""

import json
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import random_target

from ddtree_jax.models import load_target, save_target

MODEL = "language_model.model."
EXPERT = MODEL + "layers.1.mlp.experts.2.down_proj"
PACKED = ("weight_packed", "weight_scale", "weight_shape")


class Folder:
    """A saved target whose config.json and tensors can be changed."""

    def __init__(self, path, target):
        self.path, self.target = path, target
        save_target(target, path)
        self.config = json.loads((path / "config.json").read_text())
        self.text = self.config["text_config"]
        self.tensors = load_file(path / "model.safetensors")

    def load(self, **options):
        (self.path / "config.json").write_text(json.dumps(self.config))
        arrays = {name: np.ascontiguousarray(array) for name, array in self.tensors.items()}
        save_file(arrays, self.path / "model.safetensors")
        return load_target(self.path, **options)

    def refused(self, message, **options):
        with pytest.raises(ValueError, match=message) as error:
            self.load(**options)
        assert str(error.value).startswith(str(self.path)) and "\n" not in str(error.value)


@pytest.fixture
def folder(rng, tmp_path):
    return Folder(tmp_path, random_target(rng, dtype=jnp.bfloat16, experts="int4"))


def same(got, want):
    got, want = (dict(jax.tree_util.tree_leaves_with_path(model)) for model in (got, want))
    assert got.keys() == want.keys()
    for path, array in want.items():
        assert got[path].dtype == array.dtype, path
        np.testing.assert_array_equal(got[path], array, err_msg=str(path))


def dequantized(words, scale) -> np.ndarray:
    """int4 by the format's definition: element i of a word in bits 4i .. 4i + 3, plus 8."""
    nibbles = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    values = nibbles.reshape(*words.shape[:-1], -1).astype(np.float32) - 8
    return values * np.repeat(np.asarray(scale, np.float32), 32, axis=-1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("param_dtype", [None, "stored", "bfloat16"])
def test_scales_in_other_floats(folder, dtype, param_dtype):
    for name, array in folder.tensors.items():
        if name.endswith("weight_scale"):
            folder.tensors[name] = array.astype(dtype)
            assert np.array_equal(folder.tensors[name], array)  # bfloat16 of this size is exact
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = folder.load(dtype="float32", param_dtype=param_dtype)
    for name in ("gate_up", "down"):
        held = got.layers[1].mlp.experts
        want = folder.target.layers[1].mlp.experts
        for part in ("packed", "scale"):
            mine, its = (getattr(e, f"{name}_{part}")[...] for e in (held, want))
            assert mine.dtype == its.dtype
            np.testing.assert_array_equal(mine, its)


def test_scales_that_bfloat16_has_not(folder, rng):
    name = f"{EXPERT}.weight_scale"
    shape = folder.tensors[name].shape
    exact = rng.uniform(0.01, 0.03, shape).astype(np.float32)
    folder.tensors[name] = exact
    with pytest.warns(UserWarning, match="scales of packed experts are rounded to bfloat16"):
        got = folder.load(dtype="float32")
    held = np.asarray(got.layers[1].mlp.experts.down_scale[...][2])
    assert held.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(held, exact.astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(held.astype(np.float32), exact, rtol=2**-8)
    folder.tensors[name] = np.full(shape, 3.4e38, np.float32)  # above bfloat16's largest number
    folder.refused("weight_scale' holds NaN or inf", dtype="float32")


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "model."])
def test_names_without_the_inner_model(folder, prefix):
    """vLLM's mapper takes `language_model.layers.X` for `language_model.model.layers.X`."""
    folder.tensors = {
        name.replace(MODEL, prefix) if name.startswith(MODEL) else name: array
        for name, array in folder.tensors.items()
    }
    same(folder.load(), folder.target)


def test_two_names_for_one_tensor_are_refused(folder):
    norm = folder.tensors[MODEL + "norm.weight"]
    folder.tensors["language_model.norm.weight"] = norm
    folder.refused("norm.weight' is also in .* keep one")


def test_layers_for_multi_token_prediction(folder):
    layer = {n: a for n, a in folder.tensors.items() if ".layers.2." in n}
    for name, array in layer.items():
        folder.tensors[name.replace(".layers.2.", ".layers.3.")] = array
    folder.text.pop("num_nextn_predict_layers")
    folder.refused(
        r"tensors of 4 layers, but config.json has 3 \(num_hidden_layers\).*for multi-token "
        "prediction: then set num_nextn_predict_layers to 1 in config.json"
    )
    folder.text["num_nextn_predict_layers"] = 1
    same(folder.load(), folder.target)


def test_scales_of_a_quantized_cache(folder):
    for layer in range(3):
        for part in "kv":
            name = f"{MODEL}layers.{layer}.self_attn.{part}_scale"
            folder.tensors[name] = np.ones(1, np.float32)
    way_round = "--ignore_config quantization_config.kv_cache_scheme to leave"
    folder.refused("6 tensors have no place .* scales of a quantized KV cache")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    folder.text["quantization_config"]["kv_cache_scheme"] = scheme
    folder.refused(f"quantization_config.kv_cache_scheme quantizes the cache.*{way_round}")
    ignore = ("quantization_config.kv_cache_scheme",)
    same(folder.load(ignore_config=ignore), folder.target)


def test_indices_of_groups(folder):
    for name in [n for n in folder.tensors if n.endswith("weight_packed")]:
        inputs = folder.tensors[name].shape[1] * 8
        index = np.arange(inputs, dtype=np.int32) // 32
        folder.tensors[name.replace("weight_packed", "weight_g_idx")] = index
    same(folder.load(), folder.target)
    folder.tensors[f"{MODEL}layers.1.mlp.experts.2.gate_proj.weight_g_idx"] = index[:1].repeat(64)
    folder.refused("experts.2.gate_proj.weight_g_idx' should say .*: inputs out of order")
    weights = folder.text["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights["actorder"] = "group"
    folder.refused("group_0.weights.actorder is 'group', but only 'static' or 'weight'")


def test_zero_points(folder):
    folder.tensors[f"{EXPERT}.weight_zero_point"] = np.zeros((8, 2), np.int32)
    folder.refused("weight_zero_point': zero points, but only symmetric weights")


def pack_shared(folder):
    for name in [n for n in folder.tensors if "shared_experts" in n]:
        rows, columns = folder.tensors.pop(name).shape
        stem = name.removesuffix("weight")
        folder.tensors[stem + "weight_packed"] = np.zeros((rows, columns // 8), np.int32)
        folder.tensors[stem + "weight_scale"] = np.zeros((rows, columns // 32), ml_dtypes.bfloat16)


def test_packed_shared_experts(folder):
    pack_shared(folder)
    folder.refused(
        "shared_experts.down_proj.weight' is missing; instead there is .*weight_packed': only routed"
    )
    patterns = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
    quantization = folder.text["quantization_config"]
    quantization["ignore"] = ["lm_head", "re:.*self_attn.*", patterns]
    folder.refused(
        "quantization_config.ignore leaves model.layers.1.mlp.shared_experts.gate_proj quantized"
    )


def unpack(folder, stacked=False):
    """Experts in bfloat16, one by one or stacked, and what each is."""
    want = {}
    for name in [n for n in folder.tensors if n.endswith("weight_packed")]:
        stem = name.removesuffix("_packed")
        scale = folder.tensors[f"{stem}_scale"]
        want[stem] = dequantized(folder.tensors[name], scale).astype(ml_dtypes.bfloat16)
    folder.tensors = {n: a for n, a in folder.tensors.items() if not n.endswith(PACKED)}
    if not stacked:
        folder.tensors |= want
        return want
    for layer in (1, 2):
        stem = f"{MODEL}layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([want[f"{stem}.{e}.{part}_proj.weight"] for e in range(6)])
            for part in ("gate", "up", "down")
        }
        gate_up = np.concatenate([parts["gate"], parts["up"]], axis=1)
        folder.tensors |= {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": parts["down"]}
    return want


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_in_floats_under_a_quantization_that_was_left_over(folder, stacked):
    want = unpack(folder, stacked)
    folder.refused(
        "weight_packed' is missing; instead there is .* in BF16: the experts are not packed.*"
        "pass --ignore_config quantization_config$"
    )
    got = folder.load(dtype="bfloat16", ignore_config=("quantization_config",))
    assert got.config.experts == "float"
    held = got.layers[1].mlp.experts.down[...][2]
    np.testing.assert_array_equal(held, want[f"{EXPERT}.weight"])


def test_packed_experts_without_a_quantization(folder):
    del folder.text["quantization_config"]
    folder.refused("packed experts, of which config.json's quantization_config does not speak")


@pytest.mark.parametrize(
    "name, message",
    [
        ("layers.0.self_attn.o_proj.bias", "biases, which the models of this family do not have"),
        ("layers.0.self_attn.o_proj.input_scale", "scales of quantized activations"),
        ("layers.0.self_attn.o_proj.weight_scale", "parts of packed weights"),
        ("layers.0.self_attn.o_proj.weight_scale_inv", "scales of weights in fp8, but those weig"),
        ("layers.0.self_attn.o_proj.weight_g_idx", "orders of activations .actorder."),
        ("layers.0.self_attn.sinks", " in the model that config.json describes: .*sinks'$"),
    ],
)
def test_tensors_without_a_place_are_told_apart(folder, name, message):
    folder.tensors[MODEL + name] = np.ones(3, np.float32)
    folder.tensors[MODEL + "other"] = np.ones(3, np.float32)
    if name.endswith("sinks"):
        del folder.tensors[MODEL + "other"]
    folder.refused(f"1 tensors have no place.*{message}")


def test_a_missing_tensor_is_still_an_incomplete_file(folder):
    for suffix in PACKED:
        del folder.tensors[f"{EXPERT}.{suffix}"]
    folder.refused("experts.2.down_proj.weight_packed' is missing; config.json asks.* incomplete")
    folder.tensors = {
        n: a for n, a in folder.tensors.items() if ".layers.1.mlp.experts.2." not in n
    }
    folder.refused(r"layer 1 has tensors of 5 routed experts, but config.json has 6 \(n_routed_exp")
