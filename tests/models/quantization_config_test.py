"""compressed-tensors' settings are read, not inferred: each that is not served is refused by its key."""

import copy

import pytest
from published_configs import INT4
from tiny_models import TARGET

from ddtree_jax.models import KimiK26Config

GROUP = "config_groups.group_0"
WEIGHTS = f"{GROUP}.weights"


def read(quantization, **changes):
    return KimiK26Config.from_json({**TARGET, "quantization_config": quantization, **changes})


def changed(path, value):
    quantization = copy.deepcopy(INT4)
    *outer, key = path.split(".")
    inner = quantization
    for name in outer:
        inner = inner[name]
    inner[key] = value
    return quantization


@pytest.mark.parametrize(
    "path, value",
    [
        (f"{WEIGHTS}.actorder", "static"),
        (f"{WEIGHTS}.actorder", "weight"),
        (f"{WEIGHTS}.strategy", None),
        (f"{WEIGHTS}.observer", "mse"),
        (f"{WEIGHTS}.observer_kwargs", {"maxshrink": 0.1}),
        (f"{WEIGHTS}.scale_dtype", "torch.bfloat16"),
        (f"{WEIGHTS}.zp_dtype", "torch.int8"),
        (f"{WEIGHTS}.block_structure", None),
        (f"{GROUP}.format", "pack-quantized"),
        ("version", "0.12.2"),
        ("sparsity_config", {}),
        ("transform_config", {}),
        ("global_compression_ratio", 3.1),
    ],
)
def test_what_changes_nothing(path, value):
    assert read(changed(path, value)).experts == "int4"


@pytest.mark.parametrize(
    "path, value, wrong",
    [
        ("quant_method", "awq", "is 'awq', but only 'compressed-tensors' or 'fp8'"),
        ("format", "nvfp4-pack-quantized", "is 'nvfp4-pack-quantized', but only 'pack-quantized'"),
        ("format", None, "is None, but only 'pack-quantized'"),
        ("quantization_status", "frozen", "is 'frozen', but only 'compressed'"),
        ("kv_cache_scheme", {"num_bits": 8}, "quantizes the cache"),
        ("sparsity_config", {"format": "sparse-24"}, r"is {'format': 'sparse-24'}, but only {}"),
        ("transform_config", {"config_groups": {}}, "is {'config_groups': {}}, but only {}"),
        (f"{WEIGHTS}.num_bits", 8, "is 8, but only 4 is supported"),
        (f"{WEIGHTS}.num_bits", None, "is None, but only 4 is supported"),
        (f"{WEIGHTS}.type", "float", "is 'float', but only 'int'"),
        (f"{WEIGHTS}.symmetric", False, "is False, but only True"),
        (f"{WEIGHTS}.strategy", "channel", "is 'channel', but only 'group'"),
        (f"{WEIGHTS}.group_size", 64, "is 64, but only 32 is supported"),
        (f"{WEIGHTS}.group_size", -1, "is -1, but only 32 is supported"),
        (f"{WEIGHTS}.group_size", None, "is None, but only 32 is supported"),
        (f"{WEIGHTS}.dynamic", True, "is True, but only False"),
        (f"{WEIGHTS}.actorder", "group", "is 'group', but only 'static' or 'weight'"),
        (f"{WEIGHTS}.actorder", True, "is True, but only 'static' or 'weight'"),
        (f"{WEIGHTS}.block_structure", [128, 128], r"is \[128, 128\], but only null"),
        (f"{WEIGHTS}.rotation", "hadamard", "not understood"),
        (f"{GROUP}.input_activations", {"num_bits": 8}, "is {'num_bits': 8}, but only null"),
        (f"{GROUP}.output_activations", {"num_bits": 8}, "is {'num_bits': 8}, but only null"),
        (f"{GROUP}.format", "int-quantized", "is 'int-quantized', but only 'pack-quantized'"),
        (f"{GROUP}.targets", None, "must be a list, not None"),
        (f"{GROUP}.targets", [3], "must be a list of module names, not of 3"),
        (f"{GROUP}.weights", None, "is missing; supported are weights in int4"),
        (GROUP, None, "must be an object, not null"),
        ("config_groups", {}, "must have a group of weights"),
        ("ignore", "lm_head", "must be a list, not 'lm_head'"),
        ("ignore", ["re:("], "holds a pattern that cannot be read"),
        ("ignore", [f"re:{i}" for i in range(300)], "must have at most 256 patterns, not 300"),
        ("layers", [1], "not understood"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(path, value, wrong):
    with pytest.raises(ValueError, match=f"quantization_config.{path}'?:? {wrong}"):
        read(changed(path, value))


SHARED = "re:.*shared_experts.*"
ATTENTION = "re:.*self_attn.*"
DENSE = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"


@pytest.mark.parametrize(
    "ignore, left",
    [
        ([ATTENTION, SHARED, DENSE], "lm_head"),
        (["lm_head", SHARED, DENSE], "model.layers.0.self_attn.q_a_proj"),
        (["lm_head", ATTENTION, DENSE], "model.layers.1.mlp.shared_experts.gate_proj"),
        (["lm_head", ATTENTION, SHARED], "model.layers.0.mlp.gate_proj"),
        (
            ["lm_head", r"re:.*layers\.[01]\.self_attn", SHARED, DENSE],
            "model.layers.2.self_attn.q_a_",
        ),
        (["lm_head", "self_attn", SHARED, DENSE], "model.layers.0.self_attn.q_a_proj"),
        # A pattern is matched from the name's beginning.
        (["lm_head", "re:self_attn", SHARED, DENSE], "model.layers.0.self_attn.q_a_proj"),
        (None, "lm_head"),
    ],
)
def test_only_routed_experts_may_be_quantized(ignore, left):
    message = f"quantization_config.ignore leaves {left}.* quantized, but only routed experts"
    with pytest.raises(ValueError, match=message):
        read(changed("ignore", ignore))


@pytest.mark.parametrize(
    "ignore, want",
    [
        (["lm_head", ATTENTION, SHARED, DENSE], "int4"),
        (["language_model.lm_head", ATTENTION, SHARED, DENSE], "int4"),
        (["re:.*lm_head", r"re:language_model\.model\.layers.*attn", SHARED, DENSE], "int4"),
        (["re:vision_tower.*", "lm_head", ATTENTION, SHARED, DENSE], "int4"),
        (["Linear"], "float"),
        (["re:.*"], "float"),
    ],
)
def test_what_ignore_takes_out(ignore, want):
    assert read(changed("ignore", ignore)).experts == want


def test_targets():
    experts = changed(f"{GROUP}.targets", [r"re:.*\.experts\.\d+\..*_proj$"])
    assert read({**experts, "ignore": []}).experts == "int4"
    nothing = changed(f"{GROUP}.targets", ["Conv2d"])
    assert read({**nothing, "ignore": []}).experts == "float"
    attention = changed(f"{GROUP}.targets", ["re:.*self_attn.*"])
    with pytest.raises(
        ValueError, match="ignore leaves model.layers.0.self_attn.q_a_proj quantized"
    ):
        read({**attention, "ignore": []})


@pytest.mark.parametrize(
    "more",
    [r"re:.*experts\.0\..*", r"re:.*layers\.1.*experts.*", "model.layers.1.mlp.experts.3.up_proj"],
)
def test_some_experts_but_not_others(more):
    quantization = copy.deepcopy(INT4)
    quantization["ignore"].append(more)
    with pytest.raises(ValueError, match="ignore takes out some routed experts and leaves others"):
        read(quantization)


def test_a_pattern_that_takes_forever(monkeypatch):
    from ddtree_jax.models.deepseek_v3 import quantization_config

    monkeypatch.setattr(quantization_config, "_SECONDS", 0.1)
    with pytest.raises(ValueError, match="ignore holds a pattern that takes too long"):
        read(changed("ignore", ["lm_head", r"re:(\w|\w\w|\.)+\b\B"]))


def test_the_wrapper_may_say_it():
    wrapped = {"model_type": "kimi_k25", "text_config": TARGET, "quantization_config": INT4}
    assert KimiK26Config.from_json(wrapped).experts == "int4"
    both = {**wrapped, "text_config": {**TARGET, "quantization_config": INT4}}
    assert KimiK26Config.from_json(both).experts == "int4"
    both["quantization_config"] = changed("version", "0.9")
    with pytest.raises(ValueError, match="quantization_config differs from the one in text_config"):
        KimiK26Config.from_json(both)
