"""A config.json of many layers and experts before weights of few: refused before anything is made of its numbers."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import random_drafter, random_target

from ddtree_jax.models import checkpoint, load_drafter, load_target, save_drafter, save_target
from ddtree_jax.models.layout import target_rules


@pytest.fixture
def saved(rng, tmp_path, monkeypatch):
    """A target's and a drafter's folder; nothing may be made of what their config.json says from now on."""
    target = random_target(rng, experts="int4")
    save_target(target, tmp_path / "target")
    save_drafter(random_drafter(rng), tmp_path / "drafter")

    def made(*_, **__):
        raise AssertionError("work by the numbers of config.json")

    monkeypatch.setattr(checkpoint, "KimiK26", made)
    monkeypatch.setattr(checkpoint, "DFlashDrafter", made)
    monkeypatch.setattr(checkpoint, "target_rules", made)
    return target, tmp_path


def change(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    values.get("text_config", values).update(changes)
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"n_routed_experts": 2**14, "num_hidden_layers": 1024},
            r"tensors of 3 layers, but config.json has 1024 \(num_hidden_layers\)",
        ),
        (
            {"n_routed_experts": 2**14},
            r"layer 1 has tensors of 6 routed experts, but config.json has 16384 \(n_routed_exp",
        ),
        ({"n_routed_experts": 5}, "layer 1 has tensors of 6 routed experts, but config.json has 5"),
        ({"first_k_dense_replace": 0}, "layer 0 has no routed experts, but config.json gives it 6"),
        ({"vocab_size": 2**24}, r"embed_tokens.weight' has shape \(50, 64\), .* \(16777216, 64\)"),
        ({"hidden_size": 2**20}, r"embed_tokens.weight' has shape \(50, 64\), .* \(50, 1048576\)"),
    ],
)
def test_target(saved, changes, message):
    _, folder = saved
    change(folder / "target", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_target(folder / "target")
    assert str(error.value).startswith(str(folder / "target"))


def test_one_expert_of_a_high_number_does_not_make_many(saved):
    _, folder = saved
    change(folder / "target", n_routed_experts=2**14)
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    prefix = "language_model.model.layers.1.mlp.experts.16383"
    save_file({**tensors, f"{prefix}.gate_proj.weight_packed": np.zeros(3, np.int32)}, path)
    with pytest.raises(
        ValueError, match="layer 1 has tensors of 7 routed experts, but .* has 16384"
    ):
        load_target(folder / "target")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 1024, "layer_types": None}, "tensors of 2 layers, but .* has 1024"),
        (
            {"num_hidden_layers": 1, "layer_types": None},
            "tensors of 2 layers, but config.json has 1",
        ),
        (
            {"dflash_config": {"mask_token_id": 49, "target_layer_ids": [0] * 1024}},
            "fc.weight' has s",
        ),
    ],
)
def test_drafter(saved, changes, message):
    target, folder = saved
    change(folder / "drafter", **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder / "drafter", target)


@pytest.mark.parametrize("names", [("gate_up_proj",), ("gate_up_proj", "down_proj")])
def test_stacked_experts_are_as_many_as_the_router_has(saved, names):
    _, folder = saved
    change(folder / "target", n_routed_experts=2**14)
    path = folder / "target" / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if ".mlp.experts." not in k}
    for layer in (1, 2):
        prefix = f"language_model.model.layers.{layer}.mlp.experts"
        tensors |= {f"{prefix}.{name}": np.zeros(1, np.float32) for name in names}
    save_file(tensors, path)
    with pytest.raises(
        ValueError, match=r"layers.1.mlp.gate.weight' has shape \(6, 64\), .* \(16384, 64\)"
    ):
        load_target(folder / "target")


def test_layers_without_a_norm(saved):
    _, folder = saved
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    del tensors["language_model.model.layers.2.input_layernorm.weight"]
    save_file(tensors, path)
    with pytest.raises(
        ValueError, match="'model.layers.2.input_layernorm.weight' is missing; config.json asks"
    ):
        load_target(folder / "target")


def test_no_rule_is_made_past_a_missing_tensor(rng, tmp_path, monkeypatch):
    save_target(random_target(rng, experts="int4"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    missing = "model.layers.1.mlp.experts.0.gate_proj.weight_scale"
    del tensors[f"language_model.{missing}"]
    save_file(tensors, path)
    made = []

    def rules(*args):
        for rule in target_rules(*args):
            made.append(rule)
            yield rule

    monkeypatch.setattr(checkpoint, "target_rules", rules)
    with pytest.raises(ValueError, match=f"'{missing}' is missing"):
        load_target(tmp_path)
    assert missing in [source.name for source in made[-1].sources]
    assert len(made) < len(list(target_rules(random_target(rng, experts="int4"))))
