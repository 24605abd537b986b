"""Random targets and drafters of a few thousand parameters, with nothing left at its initial value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models import DFlashConfig, DFlashDrafter, KimiK26, KimiK26Config

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

TARGET = {
    "model_type": "kimi_k2",
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
    "initializer_range": 0.1,
    "eos_token_id": 3,
}

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "block_size": 5,
    "num_target_layers": 3,
    "initializer_range": 0.1,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [2, 0]},
}


def random_target(
    rng, *, dtype=jnp.float32, experts="float", cache_dtype=None, cache_scale=None, **changes
) -> KimiK26:
    """A target of `TARGET` with `changes` to its config.json."""
    config = dataclasses.replace(KimiK26Config.from_json({**TARGET, **changes}), experts=experts)
    options = dict(dtype=dtype, cache_dtype=cache_dtype, cache_scale=cache_scale)
    return random_values(rng, nnx.eval_shape(lambda: KimiK26(config, **options)))


def random_drafter(rng, *, dtype=jnp.float32, **changes) -> DFlashDrafter:
    """A drafter of `DRAFTER` with `changes` to its config.json."""
    config = DFlashConfig.from_json({**DRAFTER, **changes})
    return random_values(rng, nnx.eval_shape(lambda: DFlashDrafter(config, dtype=dtype)))


def random_values(rng, model):
    """A model of `nnx.eval_shape` with parameters: norms off one and biases off zero too, so that none is forgotten."""
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        name, shape = path[-1], parameter.shape
        if name.endswith("_packed"):
            value = rng.integers(-(2**31), 2**31, shape)
        elif name.endswith("_scale"):
            value = rng.uniform(0.01, 0.03, shape)
        elif name.endswith("_fp8"):
            value = np.clip(rng.normal(0, 100, shape), -448, 448)
        elif name.endswith("_scale_inv"):
            value = rng.uniform(5e-4, 15e-4, shape)
        elif name == "weight":
            value = rng.normal(1, 0.2, shape)
        else:
            value = rng.normal(0, 0.2 if name == "e_score_correction_bias" else 0.1, shape)
        parameter.set_value(jnp.asarray(value, parameter.dtype))
    return model


def positions_of(tokens) -> jax.Array:
    """0, 1, 2, ... for every row of i32[B, T]."""
    return jnp.broadcast_to(jnp.arange(np.shape(tokens)[1], dtype=jnp.int32), np.shape(tokens))
