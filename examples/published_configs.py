"""config.json of the published Kimi K2 family and of K2.6's DFlash drafter, key for key as far as is known."""

import copy

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
#: K2.6's text_config, and what differs in the others.
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": INT4,
    "rms_norm_eps": 1e-5,
    "rope_scaling": YARN,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def _wrapped(eos: int) -> dict:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "pad_token_id": 163839,
        "text_config": {**TEXT, "eos_token_id": eos},
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": {"model_type": "kimi_k25_vision", "vt_num_hidden_layers": 27},
    }


_SLOW_YARN = {**YARN, "beta_fast": 1.0}
_INSTRUCT = {**TEXT, "rms_norm_eps": 1e-6, "eos_token_id": 163585, "quantization_config": FP8}
FOLDERS = {
    "K2-Instruct": {
        **_INSTRUCT,
        "max_position_embeddings": 131072,
        "rope_scaling": {**_SLOW_YARN, "factor": 32.0},
    },
    "K2-Instruct-0905": {**_INSTRUCT, "rope_scaling": _SLOW_YARN},
    "K2-Thinking": {**TEXT, "rope_scaling": _SLOW_YARN},
    "K2.5": _wrapped(163585),
    "K2.6": _wrapped(163586),
}
#: Every width cut to what a test can hold; the blocks of 128 are ragged.
_TOY = {
    "hidden_size": 160,
    "intermediate_size": 200,
    "moe_intermediate_size": 160,
    "n_routed_experts": 6,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 144,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "vocab_size": 80,
}


def toy(name: str) -> dict:
    """The config.json of a folder of `FOLDERS` with other widths and nothing else changed."""
    values = copy.deepcopy(FOLDERS[name])
    values.get("text_config", values).update(_TOY)
    return values


DRAFTER = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "block_size": 8,
    "num_target_layers": 61,
    "dflash_config": {"mask_token_id": 163838},
}
