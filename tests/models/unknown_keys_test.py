"""No key of a config.json is passed over: it is read, known to be harmless, or refused by name."""

import copy
import json
import pathlib

import pytest
from published_configs import DRAFTER as PUBLISHED_DRAFTER
from published_configs import FOLDERS
from tiny_models import DRAFTER, TARGET, YARN

from ddtree_jax.models import DFlashConfig, KimiK26Config, demo

_GOLDEN = pathlib.Path(__file__).parents[1] / "data"
#: What transformers 4 writes of every model when it writes all.
TRANSFORMERS_4 = {
    "_name_or_path": "moonshotai/Kimi-K2.5",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "pad_token_id": 5,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torch_dtype": "bfloat16",
    "torchscript": False,
    "transformers_version": "4.57.6",
    "typical_p": 1.0,
    "use_bfloat16": False,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_published_targets(name):
    values = FOLDERS[name]
    config = KimiK26Config.from_json(values)
    assert config.hidden_size == 7168 and config.rope.theta == 50000.0
    text = values.get("text_config", values)
    full = {**TRANSFORMERS_4, **text}
    full = {**TRANSFORMERS_4, **values, "text_config": full} if text is not values else full
    assert KimiK26Config.from_json(full) == config


def test_published_drafter():
    config = DFlashConfig.from_json(PUBLISHED_DRAFTER)
    assert DFlashConfig.from_json({**TRANSFORMERS_4, **PUBLISHED_DRAFTER}) == config


def test_a_drafter_of_kimi_k27():
    """As SpecForge trains it, key for key."""
    yarn = {"rope_type": "yarn", **PUBLISHED_DRAFTER["rope_scaling"]}
    values = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "layer_types": ["full_attention"] * 6,
        "mask_token_id": 163838,
        "max_position_embeddings": 262144,
        "max_window_layers": 6,
        "model_type": "qwen3",
        "num_attention_heads": 64,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_target_layers": 61,
        "rms_norm_eps": 1e-05,
        "rope_scaling": yarn,
        "rope_theta": 50000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 163840,
    }
    want = DFlashConfig.from_json(PUBLISHED_DRAFTER)
    assert DFlashConfig.from_json(values) == want
    # As ModelOpt exports one with a window.
    values["dflash_config"] |= {"use_swa": True, "swa_window_size": 2048, "causal": False}
    got = DFlashConfig.from_json({**values, "sliding_window": 2048, "use_sliding_window": None})
    assert got == want.with_window(2048)


@pytest.mark.parametrize("path", sorted(_GOLDEN.rglob("config.json")), ids=str)
def test_folders_of_the_methods_authors(path):
    values = json.loads(path.read_text())
    read = DFlashConfig if "dflash_config" in values else KimiK26Config
    assert read.from_json(path).hidden_size == values["hidden_size"]


def test_there_are_such_folders():
    assert len(list(_GOLDEN.rglob("config.json"))) >= 6


def test_what_transformers_saves(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.17")
    # Given in the old spelling, which would be added to the new one's defaults.
    values = copy.deepcopy(TARGET)  # transformers writes into what it is given
    del values["rope_theta"], values["model_type"]
    flat = transformers.DeepseekV3Config(**values, rope_theta=1e4, num_mtp_layers=2)
    flat.save_pretrained(tmp_path / "flat")
    got = KimiK26Config.from_json(tmp_path / "flat")
    assert got.num_nextn_predict_layers == 2 and got.rope.factor == 8.0 and got.rope.theta == 1e4
    wrapper = transformers.AutoConfig.for_model(
        "kimi_k25", text_config=flat.to_dict(), tie_word_embeddings=False
    )
    wrapper.save_pretrained(tmp_path / "wrapped")
    assert KimiK26Config.from_json(tmp_path / "wrapped") == got
    drafter = transformers.Qwen3Config(**copy.deepcopy(DRAFTER))
    drafter.save_pretrained(tmp_path / "drafter")
    said = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert "max_window_layers" in said
    want = DFlashConfig.from_json({**DRAFTER, "rope_theta": said["rope_parameters"]["rope_theta"]})
    assert DFlashConfig.from_json(tmp_path / "drafter") == want


_WRAPPED = {"model_type": "kimi_k25", "text_config": TARGET}


@pytest.mark.parametrize("value", [1, 0, False, "x", 2.5, [1], {"a": 1}])
@pytest.mark.parametrize(
    "read, base, at",
    [
        (KimiK26Config.from_json, TARGET, ()),
        (KimiK26Config.from_json, _WRAPPED, ()),
        (KimiK26Config.from_json, _WRAPPED, ("text_config",)),
        (DFlashConfig.from_json, DRAFTER, ()),
        (DFlashConfig.from_json, DRAFTER, ("dflash_config",)),
        (KimiK26Config.from_json, TARGET, ("rope_scaling",)),
        (DFlashConfig.from_json, {**DRAFTER, "rope_scaling": YARN}, ("rope_scaling",)),
    ],
)
def test_an_unknown_key_is_refused_until_it_is_ignored(tmp_path, read, base, at, value):
    values = json.loads(json.dumps(base))
    inner = values
    for key in at:
        inner = inner[key]
    inner["swa_rope_theta"] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    name = ".".join((*at, "swa_rope_theta")).removeprefix("text_config.")
    name = name.removeprefix("dflash_config.")
    with pytest.raises(ValueError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert f"'{name}': not understood, and it could change results" in message
    assert message.endswith(f"pass --ignore_config {name}")
    assert read(path, ignore=(name,)) == read(base)
    inner["swa_rope_theta"] = None
    path.write_text(json.dumps(values))
    assert read(path) == read(base)


def test_all_unknown_keys_are_named_at_once():
    values = {**TARGET, **{f"new_{i}": i for i in range(12)}}
    with pytest.raises(ValueError, match="'new_0', .* 'new_7' and 4 more: not understood"):
        KimiK26Config.from_json(values)
    got = KimiK26Config.from_json(values, ignore=[f"new_{i}" for i in range(12)])
    assert got == KimiK26Config.from_json(TARGET)


def test_a_key_that_is_read_can_be_ignored_too():
    got = KimiK26Config.from_json(TARGET, ignore=("rope_scaling",))
    assert got == KimiK26Config.from_json({**TARGET, "rope_scaling": None})
    values = {**TARGET, "rope_scaling": {**YARN, "truncate": False}}
    assert not KimiK26Config.from_json(values).rope.truncate
    got = KimiK26Config.from_json(values, ignore=("rope_scaling.truncate",))
    assert got == KimiK26Config.from_json(TARGET)
    with pytest.raises(ValueError, match="'hidden_size' is missing"):
        KimiK26Config.from_json(TARGET, ignore=("hidden_size",))
    # One key need not be a list, and is no part of another.
    assert KimiK26Config.from_json({**TARGET, "a": 1}, ignore="a") == KimiK26Config.from_json(
        TARGET
    )
    with pytest.raises(ValueError, match="'a': not understood"):
        KimiK26Config.from_json({**TARGET, "a": 1}, ignore="ab")
    wrapped = {"model_type": "kimi_k25", "text_config": {**values, "a": 1}}
    got = KimiK26Config.from_json(wrapped, ignore=["text_config.rope_scaling.truncate", "a"])
    assert got == KimiK26Config.from_json(TARGET)


def test_a_wrapper_may_repeat_its_text_config():
    want = KimiK26Config.from_json(TARGET)
    assert KimiK26Config.from_json({**_WRAPPED, "hidden_size": 64, "rope_scaling": YARN}) == want
    with pytest.raises(ValueError, match="'hidden_size': not understood"):
        KimiK26Config.from_json({**_WRAPPED, "hidden_size": 32})
    with pytest.raises(
        ValueError, match="model_type is 'kimi_k3', but only 'kimi_k25' or 'kimi_vl'"
    ):
        KimiK26Config.from_json({**_WRAPPED, "model_type": "kimi_k3"})


@pytest.mark.parametrize("folder", [demo.TARGET, demo.DRAFTER])
def test_the_demo(folder):
    read = KimiK26Config if folder == demo.TARGET else DFlashConfig
    assert read.from_json(folder).hidden_size == 384


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": 0}, "attention_bias is 0, but only False is supported"),
        ({"mlp_bias": True}, "mlp_bias is True, but only False"),
        ({"num_local_experts": 5}, "num_local_experts is 5, but only 6 is supported"),
        ({"linear_attn_config": {"a": 1}}, "'linear_attn_config': not understood"),
        ({"index_topk": 2048}, "'index_topk': not understood"),
        ({"per_layer_config": {"1": {}}}, "'per_layer_config': not understood"),
        ({"eos_token_id": [2**31]}, "eos_token_id must lie in 0 .. 2147483647, not 2147483648"),
    ],
)
def test_keys_of_other_models(changes, message):
    with pytest.raises(ValueError, match=message):
        KimiK26Config.from_json({**TARGET, **changes})
