"""Checkpoint folders: round trips through the published layouts, and everything that can be wrong."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quick_compile
from safetensors.numpy import load_file, save_file
from tiny_models import positions_of, random_drafter, random_target

from ddtree_jax.models import load_drafter, load_target, save_drafter, save_target

EXPERT = "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_packed"


def _leaves(model):
    return {jax.tree_util.keystr(p): a for p, a in jax.tree_util.tree_leaves_with_path(model)}


@pytest.fixture
def saved(rng, tmp_path):
    """A target in bfloat16 with int4 experts, its drafter, and their folders."""
    target = random_target(rng, dtype=jnp.bfloat16, experts="int4")
    drafter = random_drafter(rng, dtype=jnp.bfloat16, is_causal=False)
    save_target(target, tmp_path / "target", token_ids={"bos_token_id": 1})
    save_drafter(drafter, tmp_path / "drafter")
    return target, drafter, tmp_path


def _edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_was_saved_comes_back_bit_for_bit(saved):
    target, drafter, folder = saved
    loaded = load_target(folder / "target")
    for name, array in _leaves(target).items():
        got = _leaves(loaded)[name]
        assert got.dtype == array.dtype, name
        np.testing.assert_array_equal(got, array, err_msg=name)
    assert loaded.config.experts == "int4"
    loaded_drafter = load_drafter(folder / "drafter", loaded)
    for name, array in _leaves(drafter).items():
        np.testing.assert_array_equal(_leaves(loaded_drafter)[name], array, err_msg=name)
    assert loaded_drafter.config == drafter.config


def test_the_layout_is_the_published_one(saved):
    _, _, folder = saved
    tensors = load_file(folder / "target" / "model.safetensors")
    assert tensors[EXPERT].dtype == np.int32 and tensors[EXPERT].shape == (32, 8)
    assert tensors[EXPERT.replace("packed", "scale")].dtype.name == "bfloat16"
    assert tensors[EXPERT.replace("packed", "shape")].tolist() == [32, 64]
    bias = tensors["language_model.model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == np.float32
    assert tensors["language_model.lm_head.weight"].shape == (50, 64)
    assert tensors["language_model.model.layers.0.self_attn.kv_b_proj.weight"].shape == (120, 512)
    config = json.loads((folder / "target" / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["model_type"] == "kimi_k2"
    assert config["bos_token_id"] == 1 and config["eos_token_id"] == 3


def test_float_experts_are_quantized_on_the_way_out(rng, tmp_path):
    target = random_target(rng)
    save_target(target, tmp_path)
    loaded = load_target(tmp_path, dtype="float32")
    weight = np.asarray(target.layers[1].mlp.experts.down[...][2])
    back = np.asarray(loaded.layers[1].mlp.experts.weights(2, jnp.float32)[1])
    step = np.abs(weight).reshape(64, 1, 32).max(-1) / 7
    assert np.max(np.abs(back - weight) / step) < 0.56
    assert loaded.layers[0].self_attn.o_proj.kernel.dtype == jnp.float32


def test_shards_prefixes_and_tensors_of_other_parts(saved):
    target, _, folder = saved
    source = folder / "target"
    tensors = load_file(source / "model.safetensors")
    os.remove(source / "model.safetensors")
    tensors["vision_tower.patch.weight"] = np.zeros(3, np.float32)
    tensors["mm_projector.proj.0.weight"] = np.zeros(3, np.float32)
    tensors["language_model.model.layers.3.eh_proj.weight"] = np.zeros(3, np.float32)
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, source / shard)
    index = {"weight_map": {k: shard for shard, keys in parts.items() for k in keys}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = _leaves(load_target(source))
    for name, array in _leaves(target).items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)

    os.remove(source / "b.safetensors")
    with pytest.raises(FileNotFoundError, match="b.safetensors.*missing"):
        load_target(source)
    shutil.copy(source / "a.safetensors", source / "b.safetensors")
    with pytest.raises(ValueError, match="is also in a.safetensors"):
        load_target(source)
    save_file({names[1]: tensors[names[1]]}, source / "b.safetensors")
    with pytest.raises(
        ValueError, match="that model.safetensors.index.json places here is missing"
    ):
        load_target(source)
    for outside in ("../b.safetensors", "/b.safetensors", "b.bin"):
        index["weight_map"][names[0]] = outside
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="not a safetensors file of this folder"):
            load_target(source)


@pytest.mark.parametrize(
    "model, head",
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
    ],
)
def test_the_prefixes_of_the_family(saved, model, head):
    target, _, folder = saved

    def rename(tensors):
        for name in list(tensors):
            short = name.removeprefix("language_model.")
            new = short.replace("model.", model, 1) if short.startswith("model.") else None
            tensors[new or short.replace("lm_head.", head, 1)] = tensors.pop(name)

    _edit(folder / "target", rename)
    loaded = _leaves(load_target(folder / "target"))
    for name, array in _leaves(target).items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_flat_float_folder(rng, tmp_path, stacked):
    target = random_target(rng)
    save_target(target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))

    def expand(tensors):
        for name in list(tensors):
            array = tensors.pop(name)
            if ".experts." not in name:
                tensors[name.removeprefix("language_model.")] = array.astype(np.float32)
        for layer in (1, 2):
            experts = target.layers[layer].mlp.experts
            gate_up, down = np.asarray(experts.gate_up[...]), np.asarray(experts.down[...])
            prefix = f"model.layers.{layer}.mlp.experts"
            if stacked:
                tensors[f"{prefix}.gate_up_proj"] = gate_up
                tensors[f"{prefix}.down_proj"] = down
                continue
            for e in range(6):
                tensors[f"{prefix}.{e}.gate_proj.weight"] = gate_up[e, :32].copy()
                tensors[f"{prefix}.{e}.up_proj.weight"] = gate_up[e, 32:].copy()
                tensors[f"{prefix}.{e}.down_proj.weight"] = down[e].copy()

    _edit(tmp_path, expand)
    loaded = load_target(tmp_path)
    assert loaded.dtype == jnp.float32
    for layer in (1, 2):
        for name in ("gate_up", "down"):
            np.testing.assert_array_equal(
                getattr(loaded.layers[layer].mlp.experts, name)[...],
                getattr(target.layers[layer].mlp.experts, name)[...],
            )
    tokens = jnp.asarray(rng.integers(0, 50, (1, 9)))
    run = quick_compile.jit(lambda model, tokens: model(tokens, positions_of(tokens)))
    want, got = np.asarray(run(target, tokens)), np.asarray(run(loaded, tokens))
    assert np.corrcoef(want.ravel(), got.ravel())[0, 1] > 0.99


_F8 = ml_dtypes.float8_e4m3fn
NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(NORM), r"'model.norm.weight' is missing"),
        (
            lambda t: t.update({NORM: np.zeros(9, np.float32)}),
            r"has shape \(9,\).*makes it \(64,\)",
        ),
        (lambda t: t.update({NORM: np.zeros(64, np.int32)}), "is I32, but supported here is BF16"),
        (
            lambda t: t.update({EXPERT: t[EXPERT].view(np.float32)}),
            "is F32, but supported here is I32",
        ),
        (
            lambda t: t.update({"extra.weight": np.zeros(1)}),
            "1 tensors have no place.*'extra.weight'",
        ),
        (
            lambda t: t.update({EXPERT.replace("packed", "shape"): np.array([64, 32], np.int32)}),
            r"should say \(32, 64\)",
        ),
        (
            lambda t: t.update({EXPERT.replace("packed", "shape"): np.array(32, np.int32)}),
            r"weight_shape' has shape \(\)",
        ),
        (
            lambda t: t.update({EXPERT.replace("packed", "shape"): np.zeros(2, _F8)}),
            "weight_shape' is F8_E4M3, but supported here is I32 or I64",
        ),
        (lambda t: t.update({NORM: np.zeros(64, _F8)}), "is F8_E4M3, but supported here is BF16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(saved, change, message):
    _, _, folder = saved
    _edit(folder / "target", change)
    with pytest.raises(ValueError, match=message) as error:
        load_target(folder / "target")
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("size", [0, 7, 1000])
def test_a_truncated_file_is_named(saved, size):
    _, _, folder = saved
    path = folder / "target" / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match="model.safetensors: truncated.*download it again"):
        load_target(folder / "target")


def test_folders_that_are_no_checkpoint(saved):
    target, _, folder = saved
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        load_target(folder / "nowhere")
    os.remove(folder / "target" / "model.safetensors")
    (folder / "target" / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(FileNotFoundError, match="only safetensors are loaded"):
        load_target(folder / "target")
    os.remove(folder / "drafter" / "config.json")
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_drafter(folder / "drafter", target)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": 96}, "hidden_size 64, this one has 96"),
        ({"vocab_size": 51}, "vocab_size 50, this one has 51"),
        ({"num_hidden_layers": 2}, "num_target_layers 3, this one has 2"),
    ],
)
def test_a_drafter_of_another_target(saved, rng, changes, message):
    _, _, folder = saved
    with pytest.raises(ValueError, match=message):
        load_drafter(folder / "drafter", random_target(rng, **changes))


def test_arguments(saved):
    _, _, folder = saved
    with pytest.raises(ValueError, match="mesh must be a jax.sharding.Mesh, not a object"):
        load_target(folder / "target", mesh=object())
    with pytest.raises(ValueError, match="must be 'float32' or 'bfloat16'"):
        load_target(folder / "target", dtype="float16")


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"num_hidden_layers": 1},
            r"tensors of 3 layers, but config.json has 1 \(num_hidden_layers\)",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob must be true or false"),
    ],
)
def test_a_config_that_would_drop_weights_is_refused(saved, change, message):
    source = saved[2] / "target"
    config = json.loads((source / "config.json").read_text())
    config["text_config"].update(change)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_target(source)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.clear(), "the weight_map is empty"),
        (lambda m: m.pop(NORM), "norm.weight' is here, but not in model.safetensors.index.json"),
    ],
)
def test_an_index_that_lists_too_little_is_refused(saved, change, message):
    source = saved[2] / "target"
    names = load_file(source / "model.safetensors")
    weight_map = dict.fromkeys(names, "model.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    load_target(source)
    change(weight_map)
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message):
        load_target(source)


@pytest.mark.parametrize("text", ["[" * 100_000, "\udcff", '{"weight_map": 3}', "{}"])
def test_an_index_that_cannot_be_read_is_named(saved, text):
    index = saved[2] / "target" / "model.safetensors.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="index.json: no readable weight_map"):
        load_target(saved[2] / "target")


def _write_in_order(path, tensors):
    """A safetensors file by hand: name to (dtype's name, shape, bytes), one right behind the other."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_tensors_at_odd_offsets_and_in_any_order(saved, rng):
    target, _, folder = saved
    path = folder / "target" / "model.safetensors"
    names = {"bfloat16": "BF16", "float32": "F32", "int32": "I32"}
    tensors = {
        name: (names[array.dtype.name], list(array.shape), array.tobytes())
        for name, array in load_file(path).items()
    }
    shuffled = rng.permutation(list(tensors)).tolist()
    odd = {"vision_tower.odd": ("U8", [3], b"abc")}
    _write_in_order(path, odd | {name: tensors[name] for name in shuffled})
    loaded = _leaves(load_target(folder / "target"))
    for name, array in _leaves(target).items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)
    _write_in_order(path, {"vision_tower.tiny": ("F4", [4], b"ab")} | tensors)
    with pytest.raises(ValueError, match="the tensor 'vision_tower.tiny' is F4, which is not supp"):
        load_target(folder / "target")


def test_a_tied_head_must_be_the_embedding(rng, tmp_path):
    target = random_target(rng, tie_word_embeddings=True)
    save_target(target, tmp_path)
    embedding = "language_model.model.embed_tokens.weight"
    head = "language_model.lm_head.weight"
    _edit(tmp_path, lambda t: t.update({head: t[embedding].copy()}))
    loaded = load_target(tmp_path)
    assert loaded.config.tie_word_embeddings and not hasattr(loaded, "lm_head")
    _edit(tmp_path, lambda t: t.update({head: t[embedding][::-1].copy()}))
    with pytest.raises(ValueError, match="'lm_head.weight' is not the embedding; set it to false"):
        load_target(tmp_path)
    _edit(tmp_path, lambda t: t.update({head: t[embedding][:9].copy()}))
    with pytest.raises(ValueError, match=r"lm_head.weight' has shape \(9, 64\)"):
        load_target(tmp_path)
