"""What config.json may say, in the spellings that exist, and what is refused."""

import json

import pytest
from published_configs import INT4 as QUANTIZATION
from tiny_models import DRAFTER, TARGET, YARN

from ddtree_jax.models import DFlashConfig, KimiK26Config
from ddtree_jax.models.dflash.windows import DraftLayer


def test_wrapper_and_flat_say_the_same(tmp_path):
    flat = KimiK26Config.from_json(TARGET)
    wrapped = {"model_type": "kimi_k25", "eos_token_id": 9, "text_config": TARGET}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    assert KimiK26Config.from_json(tmp_path) == flat
    assert KimiK26Config.from_json(tmp_path / "config.json") == flat
    assert flat.eos_token_ids == (3,) and flat.experts == "float"


def test_rope_spellings_say_the_same():
    old = KimiK26Config.from_json(TARGET)
    new = {k: v for k, v in TARGET.items() if k not in ("rope_theta", "rope_scaling")}
    scaling = {k: v for k, v in YARN.items() if k != "type"}
    new["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": 10000.0}
    assert KimiK26Config.from_json(new) == old
    plain = KimiK26Config.from_json({**TARGET, "rope_scaling": None})
    assert plain.rope.factor is None and plain.softmax_scale == 80**-0.5


def test_quantized_experts():
    quantized = {**TARGET, "quantization_config": QUANTIZATION}
    assert KimiK26Config.from_json(quantized).experts == "int4"
    with pytest.raises(ValueError, match="'quantization_config.weight_block_size' is missing"):
        KimiK26Config.from_json({**TARGET, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("key", ["hidden_size", "q_lora_rank", "rms_norm_eps", "rope_theta"])
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    values = {k: v for k, v in TARGET.items() if k != key}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as error:
        KimiK26Config.from_json(path)
    assert f"'{key}' is missing" in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank must be 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim must be 64"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"hidden_size": "wide"}, "hidden_size|wide"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"hidden_size": -64}, "hidden_size must lie in 1 .."),
        ({"hidden_size": 1.5}, "hidden_size must be a whole number"),
        ({"vocab_size": float("inf")}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must lie in 1 .."),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must lie in 1 .."),
        ({"n_routed_experts": 10**9}, "n_routed_experts must lie in 1 .."),
        ({"n_group": 0}, "n_group must lie in 1 .."),
        ({"moe_layer_freq": 0}, "moe_layer_freq must lie in 1 .."),
        ({"q_lora_rank": -1}, "q_lora_rank must lie in 1 .."),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": -1}, "theta must be above 1"),
        ({"rope_theta": 1}, "theta must be above 1, not 1"),
        ({"rope_theta": "x"}, "rope_theta must be a finite number, not 'x'"),
        ({"rope_theta": None}, "rope_theta must be a finite number|'rope_theta' is missing"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor must be above 0"),
        ({"q_lora_rank": "abc"}, "q_lora_rank must be a whole number, not 'abc'"),
        ({"eos_token_id": ["x"]}, "eos_token_id must be a whole number, not 'x'"),
        ({"topk_group": 2}, "topk_group must lie in 1 .. n_group 1, not 2"),
        (
            {"hidden_size": 100, "quantization_config": QUANTIZATION},
            "hidden_size must be a multiple of 32 with int4 experts .*, not 100",
        ),
        (
            {"moe_intermediate_size": 40, "quantization_config": QUANTIZATION},
            "moe_intermediate_size must be a multiple of 32 with int4 experts",
        ),
        (
            {"quantization_config": {**QUANTIZATION, "config_groups": {}}},
            "quantization_config.config_groups must have a group of weights",
        ),
        ({"max_position_embeddings": 0}, "max_position_embeddings must lie in 1 .."),
        ({"n_group": 4}, "multiple of n_group"),
        ({"num_experts_per_tok": 7}, r"1 \.\. 6, not 7"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling.factor' is missing"),
    ],
)
def test_what_the_target_does_not_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        KimiK26Config.from_json({**TARGET, **changes})


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        KimiK26Config.from_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        KimiK26Config.from_json(tmp_path)


def test_drafter():
    config = DFlashConfig.from_json(DRAFTER)
    assert config.taps == (2, 0) and config.mask_token_id == 49
    assert config.layers == (DraftLayer(),) * 2
    nested = {**DRAFTER["dflash_config"], "block_size": 7}
    assert DFlashConfig.from_json({**DRAFTER, "dflash_config": nested}).block_size == 7


def test_default_taps_are_those_of_the_published_drafter():
    values = {**DRAFTER, "num_target_layers": 61, "num_hidden_layers": 6}
    values["dflash_config"] = {"mask_token_id": 49}
    assert DFlashConfig.from_json(values).taps == (1, 12, 24, 35, 47, 58)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 1}, "block_size must lie in 2 .. 32"),
        ({"num_target_layers": 2}, "target layer 2 lies outside the target's 2 layers"),
        ({"dflash_config": {"mask_token_id": 50}}, "outside the vocabulary 50"),
        ({"dflash_config": {}}, "'mask_token_id' is missing"),
        ({"num_key_value_heads": 3}, "multiple of"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"layer_types": ["odd"] * 2}, "unknown layer type 'odd'"),
        ({"layer_types": 3}, "layer_types must be a list, not 3"),
        ({"causal": "false"}, "causal must be true or false, not 'false'"),
        ({"is_causal": 0}, "is_causal must be true or false, not 0"),
        ({"use_swa": "no"}, "use_swa must be true or false, not 'no'"),
        ({"use_swa": True}, "'swa_window_size' is missing"),
        ({"use_swa": True, "swa_window_size": 0}, "window of a layer must be at least 1, not 0"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be above 0, not 0"),
        ({"final_logit_softcapping": -3.0}, "final_logit_softcapping must be above 0"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping must be a finite number"),
        ({"output_multiplier": 0}, "output_multiplier must be above 0"),
        (
            {"target_layer_ids": "ab", "dflash_config": {"mask_token_id": 1}},
            "target_layer_ids must",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    ],
)
def test_what_the_drafter_does_not_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig.from_json({**DRAFTER, **changes})
