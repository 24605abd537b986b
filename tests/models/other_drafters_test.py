"""Folders of other kinds of drafter are refused by their kind, by config.json and by tensors."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import DRAFTER, random_drafter, random_target

from ddtree_jax.models import DFlashConfig, load_drafter, save_drafter


@pytest.mark.parametrize(
    "changes, nested, kind",
    [
        ({"architectures": ["DFlash2DraftModel"]}, {}, "a DFlash2 drafter .it says 'DFlash2DraftM"),
        ({}, {"selector_rank": 256}, "a DFlash2 drafter .it has the key 'selector_rank'"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 16}, "a DFlash2 drafter"),
        ({"speculators_model_type": "dflash2"}, {}, "a DFlash2 drafter"),
        (
            {"architectures": ["Qwen3DSparkModel"]},
            {},
            "a DSpark drafter .it says 'Qwen3DSparkModel'",
        ),
        ({"architectures": ["DSparkDraftModel"]}, {"projector_type": "dspark"}, "a DSpark drafter"),
        ({"model_type": "k3_dspark"}, {}, "a DSpark drafter .it says 'k3_dspark'"),
        ({}, {"projector_type": "dspark"}, "a DSpark drafter .it says 'dspark'"),
        ({"markov_rank": 256}, {}, "a DSpark drafter .it has the key 'markov_rank'"),
        ({"enable_confidence_head": True}, {}, "a DSpark drafter"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "an EAGLE drafter"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, {}, "an EAGLE drafter"),
        ({"emb_dim": 256}, {"projector_type": "domino"}, "a Domino drafter .it says 'domino'"),
        ({"architectures": ["LiLiCorrDraftModel"]}, {}, "a LiLiCorr drafter"),
        ({"architectures": ["DFlashSpeculator"]}, {}, "a drafter in the form of speculators"),
    ],
)
def test_by_config(changes, nested, kind):
    values = {**DRAFTER, **changes}
    values["dflash_config"] = {**DRAFTER["dflash_config"], **nested}
    with pytest.raises(ValueError, match=f"this is {kind}.*only DFlash drafters"):
        DFlashConfig.from_json(values)


@pytest.mark.parametrize(
    "key, served, refused",
    [
        ("draft_vocab_size", 50, 32),
        ("target_hidden_size", 64, 32),
        ("sample_from_anchor", False, True),
        ("shift_label", False, True),
        ("attention_sink_bias", False, True),
        ("attention_mode", "gqa", "mla"),
        ("projector_type", "dflash", "mlp"),
    ],
)
def test_keys_that_only_others_set(key, served, refused):
    assert DFlashConfig.from_json({**DRAFTER, key: served}) == DFlashConfig.from_json(DRAFTER)
    with pytest.raises(ValueError, match=f"{key} is {refused!r}, but only {served!r}"):
        DFlashConfig.from_json({**DRAFTER, key: refused})


@pytest.mark.parametrize(
    "name, kind",
    [
        ("candidate_selector.predecessor_codebook", "a DFlash2 drafter"),
        ("layers.1.mlp_conv.base_kernel", "a DFlash2 drafter"),
        ("layers.0.attention_conv.kernel_projection.weight", "a DFlash2 drafter"),
        ("markov_head.markov_w1.weight", "a DSpark drafter"),
        ("markov_w2.weight", "a DSpark drafter"),
        ("confidence_head.proj.bias", "a DSpark drafter"),
        ("prefix_gru.weight_ih_l0", "a Domino drafter"),
        ("lilicorr.layers.0.weight", "a LiLiCorr drafter"),
        ("fc_norm.0.weight", "an EAGLE drafter"),
        ("layers.0.hidden_norm.weight", "an EAGLE drafter"),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", "a drafter over latent attention"),
        ("d2t", "a drafter with a vocabulary of its own"),
        ("lm_head.weight", "a drafter with a head or an embedding of its own"),
        ("embed_tokens.weight", "a drafter with a head or an embedding of its own"),
    ],
)
def test_by_tensors(rng, tmp_path, name, kind):
    target = random_target(rng)
    save_drafter(random_drafter(rng), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for stored in (name, f"model.{name}"):
        save_file({**tensors, stored: np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="only DFlash drafters") as error:
            load_drafter(tmp_path, target)
        assert f"{tmp_path}: this is {kind}" in str(error.value) and repr(name) in str(error.value)
