"""Writes a target in the published K2.6 layout and a drafter in DFlash's.

What is written loads with `load_target` and `load_drafter`, and follows the names, shapes and
packing of the published checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from . import quantization
from .deepseek_v3.config import KimiK26Config
from .dflash.config import DFlashConfig
from .dflash.model import DFlashDrafter
from .kimi_k26 import KimiK26
from .layout import Rule, drafter_rules, target_rules
from .rope import RopeConfig
from .tensors import SINGLE

_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": quantization.GROUP,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
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


def save_target(
    target: KimiK26, path: str | os.PathLike, *, token_ids: dict[str, int] | None = None
):
    """Writes config.json, generation_config.json and model.safetensors, experts in int4.

    Args:
      target: float experts are quantized on the way; sizes must be multiples of 32. Experts in fp8
        are refused: to round them twice would help nobody.
      path: the folder, made if needed.
      token_ids: `bos_token_id`, `pad_token_id` and the like for the wrapper's config.
    """
    packed = pack_experts(target)
    os.makedirs(path, exist_ok=True)
    text = _target_config(packed.config)
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": text["tie_word_embeddings"],
        **(token_ids or {}),
        "eos_token_id": text["eos_token_id"],
        "text_config": text,
    }
    _write_json(path, "config.json", wrapper)
    _write_json(
        path,
        "generation_config.json",
        {"eos_token_id": text["eos_token_id"], "max_length": text["max_position_embeddings"]},
    )
    _write_tensors(path, packed, target_rules(packed), "language_model.")


def save_drafter(drafter: DFlashDrafter, path: str | os.PathLike):
    """Writes the drafter's config.json and model.safetensors in bfloat16.

    Args:
      drafter: the drafter.
      path: the folder, made if needed.
    """
    os.makedirs(path, exist_ok=True)
    _write_json(path, "config.json", _drafter_config(drafter.config))
    _write_tensors(path, drafter, drafter_rules(drafter), "")


def pack_experts(target: KimiK26) -> KimiK26:
    """The same model with its routed experts in packed int4; itself when they already are."""
    kinds = {layer.mlp.experts.kind for layer in target.layers if layer.is_moe}
    if "fp8" in kinds:
        raise ValueError("experts in fp8 are not written in int4: save a target of another kind")
    if target.config.experts == "int4" and "float" not in kinds:
        return target
    config = dataclasses.replace(target.config, experts="int4")
    # Each parameter brings its own dtype along.
    packed = nnx.eval_shape(lambda: KimiK26(config, dtype=target.dtype))
    slots = dict(nnx.to_flat_state(nnx.state(packed)))
    for path, parameter in nnx.to_flat_state(nnx.state(target)):
        if path in slots:
            slots[path].set_value(parameter[...])
            continue
        words, scale = _packed(parameter[...])
        slots[(*path[:-1], f"{path[-1]}_packed")].set_value(words)
        slots[(*path[:-1], f"{path[-1]}_scale")].set_value(scale)
    return packed


@jax.jit
def _packed(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words and scales of a float weight."""
    values, scale = quantization.quantize(weight)
    return quantization.pack(values), scale


def _write_tensors(path, model: nnx.Module, rules: list[Rule], prefix: str):
    values = {p: v[...] for p, v in nnx.to_flat_state(nnx.state(model))}
    tensors: dict[str, np.ndarray] = {}
    for rule in rules:
        arrays = rule.save([np.asarray(_stored(p, values[p])) for p in rule.paths])
        for source, array in zip(rule.sources, arrays, strict=True):
            tensors[prefix + source.name] = np.ascontiguousarray(array)
        for name, value in rule.constants.items():
            tensors[prefix + name] = np.asarray(value, np.int32)
    save_file(tensors, os.path.join(path, SINGLE), metadata={"format": "pt"})


def _stored(path: tuple, value: jax.Array) -> jax.Array:
    if path[-1] == "e_score_correction_bias" or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return value.astype(jnp.bfloat16)


def _target_config(config: KimiK26Config) -> dict[str, Any]:
    own = ("rope", "eos_token_ids", "experts")
    values = {name: value for name, value in vars(config).items() if name not in own}
    eos = config.eos_token_ids
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **values,
        **_rope_json(config.rope),
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": "bfloat16",
        "quantization_config": _QUANTIZATION,
    }


def _drafter_config(config: DFlashConfig) -> dict[str, Any]:
    own = ("rope", "taps", "layers", "mask_token_id")
    values = {name: value for name, value in vars(config).items() if name not in own}
    causal = {layer.causal for layer in config.layers}
    if len(causal) > 1:
        raise ValueError("config.json holds one causal flag for all drafter layers")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **values,
        **_rope_json(config.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": [
            "full_attention" if layer.window is None else "sliding_attention"
            for layer in config.layers
        ],
        **_windows([layer.window for layer in config.layers]),
        "is_causal": causal.pop(),
        "dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
        },
    }


def _windows(windows: list[int | None]) -> dict[str, Any]:
    """One window in Qwen3's key; several, which that cannot say, in a list."""
    different = set(windows) - {None}
    if len(different) > 1:
        return {"sliding_windows": windows}
    return {"sliding_window": different.pop() if different else None}


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    if rope.factor is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {
        name: value for name, value in vars(rope).items() if name != "theta" and value is not None
    }
    return {"rope_theta": rope.theta, "rope_scaling": {"type": "yarn", **scaling}}


def _write_json(folder, name: str, values: dict[str, Any]):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
