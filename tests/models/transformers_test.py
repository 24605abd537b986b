"""The target against transformers' DeepseekV3ForCausalLM, through a folder that transformers wrote."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import positions_of

from ddtree_jax.models import load_target

torch = pytest.importorskip(
    "torch", reason="torch is not installed: no outside reference to compare with"
)
transformers = pytest.importorskip("transformers", minversion="5.17")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 16.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "yarn, other mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "direct queries": {"q_lora_rank": None, "n_shared_experts": 2},
    "expert groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "raw weights, all dense but one": {"norm_topk_prob": False, "first_k_dense_replace": 2},
    "tied head": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_layer_outputs(rng, tmp_path, case):
    settings = {
        "vocab_size": 60,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 40,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 64,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.3,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
        **CASES[case],
    }
    torch.manual_seed(int(rng.integers(2**31)))
    config = transformers.DeepseekV3Config(**settings)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.08)
        tokens = rng.integers(0, 60, (2, 90))
        want = model(torch.as_tensor(tokens), output_hidden_states=True, use_cache=False)
    model.save_pretrained(tmp_path)

    target = load_target(tmp_path, dtype="float32")
    tokens = jnp.asarray(tokens, jnp.int32)
    forward = jax.jit(target.forward, static_argnames="taps")
    hidden, features = forward(tokens, positions_of(tokens), taps=(1, 0))
    scale = want.logits.abs().max().item()
    np.testing.assert_allclose(target.head(hidden), want.logits.numpy(), rtol=0, atol=2e-5 * scale)
    outputs = [want.hidden_states[2].numpy(), want.hidden_states[1].numpy()]
    for mine, its in zip(np.split(np.asarray(features), 2, axis=-1), outputs, strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=2e-5 * np.abs(its).max())
