"""What `config.json` says about a target and a drafter: the only source of their constants."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from . import fp8
from .rope import RopeConfig

LATENT_DIM = 512  # what the kernels serve: see ffi/ddtree.h
ROPE_DIM = 64
_MOST_LAYERS = 1024


class _Section:
    """A JSON object that names its file and key when something is missing."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def need(self, key: str) -> Any:
        if key not in self.values:
            raise ValueError(f"{self.where}: the key {key!r} is missing")
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """The whole number at `key`; without a default the key must be there."""
        return self._convert(_whole, key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number at `key`; without a default the key must be there."""
        return self._convert(_number, key, default)

    def flag(self, key: str, default: bool | None) -> bool | None:
        """True or false at `key`; a string that says so is not it."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value

    def optional(self, key: str, convert) -> Any:
        """What `convert` makes of the value at `key`; None where there is none."""
        return None if self.get(key) is None else self._convert(convert, key, None)

    def _convert(self, convert, key, default):
        value = self.need(key) if default is None else self.get(key, default)
        try:
            return convert(value)
        except ValueError as error:
            raise ValueError(f"{self.where}: {key} {error}") from error

    def only(self, key: str, *served: Any):
        """Refuses any value of `key` but those served; a missing key is fine."""
        value = self.values.get(key)
        if value is not None and value not in served:
            choices = " or ".join(repr(s) for s in served)
            raise ValueError(f"{self.where}: {key} is {value!r}, but only {choices} is supported")


def read_json(path_or_dict: str | os.PathLike | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The object and a name for messages. A folder stands for the config.json in it.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not JSON, or not an object.
    """
    if isinstance(path_or_dict, Mapping):
        return dict(path_or_dict), "config"
    path = os.fspath(path_or_dict)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder holds a config.json")
    with open(path, encoding="utf-8-sig") as file:  # editors put a byte-order mark in front
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(values).__name__}")
    return values, path


def _whole(value: Any) -> int:
    """A JSON number without a fraction; nothing else becomes an integer quietly."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"must be a whole number, not {value!r}")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"must be a finite number, not {value!r}")
    return float(value)


@contextlib.contextmanager
def _naming(where: str):
    """Puts the file's name in front of what is wrong with one of its values."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        if str(error).startswith(where.split(" (")[0]):
            raise
        raise ValueError(f"{where}: {error}") from error


def _check_bounds(config: Any, bounds: Mapping[str, tuple[float, float]]):
    """Refuses sizes that no model has before anything is allocated by them."""
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} must lie in {low} .. {high}, not {value}")


def _rope(section: _Section) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    nested = section.get("rope_parameters")
    scaling = nested if nested is not None else section.get("rope_scaling", {})
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{section.where}: the rope scaling must be an object, not {scaling!r}")
    inner = _Section(scaling, f"{section.where} (rope)")
    theta = inner.optional("rope_theta", _number)
    theta = section.number("rope_theta") if theta is None else theta
    kind = inner.get("rope_type", inner.get("type", "default"))
    override = section.optional("rope_attention_factor", _number)
    override = inner.optional("attention_factor", _number) if override is None else override
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(
            f"{section.where}: rope type {kind!r}, but only 'default' or 'yarn' is supported"
        )
    optional = {
        key: inner.number(key) for key in ("mscale", "mscale_all_dim") if inner.get(key) is not None
    }
    return RopeConfig(
        theta=theta,
        factor=inner.number("factor"),
        original_max_position_embeddings=inner.optional("original_max_position_embeddings", _whole)
        or section.whole("max_position_embeddings"),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=override,
        **optional,
    )


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(_whole(v) for v in value) if isinstance(value, list | tuple) else (_whole(value),)


@dataclasses.dataclass(frozen=True)
class KimiK26Config:
    """Sizes and constants of a Kimi K2 / DeepSeek-V3 text model, named as in its config.json.

    Attributes beyond those names:
      rope: rotary constants.
      latent_norm_eps: epsilon of the norms on the query's and the keys' latents. The published
        models build them without the config's epsilon, hence 1e-6.
      experts: how the routed experts are stored: "int4" packed, "fp8" in blocks, else "float". With
        "fp8" the other linear layers are stored so too.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    latent_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    experts: str = "float"
    num_nextn_predict_layers: int = 0

    def __post_init__(self):
        _check_bounds(self, _TARGET_BOUNDS)
        for name, served in (("kv_lora_rank", LATENT_DIM), ("qk_rope_head_dim", ROPE_DIM)):
            if getattr(self, name) != served:
                raise ValueError(
                    f"{name} must be {served} (what the kernels serve), not {getattr(self, name)}"
                )
        if self.n_routed_experts % self.n_group:
            raise ValueError(
                f"n_routed_experts {self.n_routed_experts} "
                f"must be a multiple of n_group {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group must lie in 1 .. n_group {self.n_group}, not {self.topk_group}"
            )
        if self.experts == "int4":
            for name in ("hidden_size", "moe_intermediate_size"):
                if getattr(self, name) % 32:
                    raise ValueError(
                        f"{name} must be a multiple of 32 with int4 experts (the inputs that share "
                        f"a scale), not {getattr(self, name)}"
                    )
        chosen_from = self.n_routed_experts // self.n_group * self.topk_group
        if not 1 <= self.num_experts_per_tok <= chosen_from:
            raise ValueError(
                f"num_experts_per_tok must lie in 1 .. {chosen_from}, "
                f"not {self.num_experts_per_tok}"
            )

    @classmethod
    def from_json(cls, path_or_dict) -> KimiK26Config:
        """Reads a kimi_k25 wrapper (its `text_config`) or a flat kimi_k2 / deepseek_v3 config.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a needed key is missing, or a value is one that this model does not compute.
        """
        values, where = read_json(path_or_dict)
        outer = _Section(values, where)
        text = outer
        if "text_config" in values:
            if not isinstance(values["text_config"], Mapping):
                raise ValueError(f"{where}: text_config must be an object")
            text = _Section(values["text_config"], f"{where} (text_config)")
        text.only("model_type", "kimi_k2", "deepseek_v3")
        text.only("hidden_act", "silu")
        text.only("scoring_func", "sigmoid")
        text.only("topk_method", "noaux_tc")
        text.only("attention_bias", False)
        text.only("rope_interleave", True)
        quantization = text.get("quantization_config", outer.get("quantization_config"))
        with _naming(text.where):
            text.need("q_lora_rank")  # null is an answer, silence is not
            return cls(
                **{name: text.whole(name) for name in _TARGET_INTEGERS},
                q_lora_rank=text.optional("q_lora_rank", _whole),
                n_shared_experts=text.whole("n_shared_experts", 0),
                num_nextn_predict_layers=text.whole("num_nextn_predict_layers", 0),
                n_group=text.whole("n_group", 1),
                topk_group=text.whole("topk_group", 1),
                norm_topk_prob=text.flag("norm_topk_prob", True),
                routed_scaling_factor=text.number("routed_scaling_factor"),
                moe_layer_freq=text.whole("moe_layer_freq", 1),
                rms_norm_eps=text.number("rms_norm_eps"),
                rope=_rope(text),
                latent_norm_eps=text.number("latent_norm_eps", 1e-6),
                tie_word_embeddings=text.flag(
                    "tie_word_embeddings", outer.flag("tie_word_embeddings", False)
                ),
                initializer_range=text.number("initializer_range", 0.02),
                eos_token_ids=text.optional("eos_token_id", _ids)
                or outer.optional("eos_token_id", _ids)
                or (),
                experts="float" if quantization is None else _experts(quantization, where),
            )

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based `layer` routes to experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def softmax_scale(self) -> float:
        """(qk_nope + qk_rope)^-0.5 times YaRN's squared mscale."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_factor


_TARGET_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "max_position_embeddings",
)


_TARGET_BOUNDS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "num_hidden_layers": (1, _MOST_LAYERS),
    "num_attention_heads": (1, 2**12),
    "q_lora_rank": (1, 2**20),
    "qk_nope_head_dim": (1, 2**14),
    "v_head_dim": (1, 2**14),
    "intermediate_size": (1, 2**22),
    "moe_intermediate_size": (1, 2**22),
    "n_routed_experts": (1, 2**14),
    "n_shared_experts": (0, 2**8),
    "n_group": (1, 2**14),
    "topk_group": (1, 2**14),
    "first_k_dense_replace": (0, 2**20),
    "moe_layer_freq": (1, 2**20),
    "num_nextn_predict_layers": (0, _MOST_LAYERS),
    "max_position_embeddings": (1, 2**30),
    "rms_norm_eps": (0, 1),
    "latent_norm_eps": (0, 1),
}


def _experts(quantization: Any, where: str) -> str:
    """How K2-Instruct ("fp8"), or K2-Thinking, K2.5 and K2.6 ("int4"), say that experts are stored."""
    remedy = (
        "supported is compressed-tensors pack-quantized int4, symmetric, in groups of 32, "
        "and fp8 e4m3 in blocks of 128 x 128"
    )
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8":
        told = [quantization.get(k) for k in ("fmt", "weight_block_size", "activation_scheme")]
        if told[0] not in (None, "e4m3") or told[1] != [fp8.BLOCK] * 2 or told[2] == "static":
            raise ValueError(f"{where}: quantization_config asks for something else; {remedy}")
        return "fp8"
    try:
        weights = [group["weights"] for group in quantization["config_groups"].values()]
        if not weights:
            raise ValueError(f"{where}: quantization_config has no config_groups; {remedy}")
        served = quantization["format"] == "pack-quantized" and all(
            (w["num_bits"], w["type"], w["symmetric"], w["strategy"], w["group_size"])
            == (4, "int", True, "group", 32)
            for w in weights
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{where}: quantization_config cannot be read ({error!r}); {remedy}"
        ) from error
    if not served:
        raise ValueError(f"{where}: quantization_config asks for something else; {remedy}")
    return "int4"


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """How one drafter layer sees the block: `causal`, and a `window` of positions (None: all)."""

    causal: bool = False
    window: int | None = None

    def sees(self, ahead):
        """Whether a slot sees a column `ahead` positions after it (an array of integers)."""
        seen = (ahead <= 0) if self.causal else (ahead == ahead)
        return seen if self.window is None else seen & (abs(ahead) < self.window)


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """Sizes and constants of a DFlash drafter (arXiv 2602.06036), named as in its config.json.

    Attributes beyond those names:
      taps: 0-based target layers whose outputs feed the drafter, in the order of `fc`'s columns.
      layers: one `DraftLayer` for each decoder layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    layers: tuple[DraftLayer, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02

    def __post_init__(self):
        _check_bounds(self, _DRAFTER_BOUNDS)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} lies outside the vocabulary {self.vocab_size}"
            )
        for name in ("final_logit_softcapping", "output_multiplier"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        for layer in self.layers:
            if layer.window is not None and layer.window < 1:
                raise ValueError(f"the window of a layer must be at least 1, not {layer.window}")
        for tap in self.taps:
            if not 0 <= tap < self.num_target_layers:
                raise ValueError(
                    f"target layer {tap} lies outside the target's {self.num_target_layers} layers"
                )
        if len(self.layers) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layers)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )

    @classmethod
    def from_json(cls, path_or_dict) -> DFlashConfig:
        """Reads a DFlashDraftModel config; `dflash_config` wins over the top level.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a needed key is missing, or a value is one that this drafter does not compute.
        """
        values, where = read_json(path_or_dict)
        nested = values.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"{where}: dflash_config must be an object")
        both = _Section({**values, **{k: v for k, v in nested.items() if v is not None}}, where)
        architectures = both.get("architectures", ["DFlashDraftModel"])
        if not isinstance(architectures, list) or "DFlashDraftModel" not in architectures:
            raise ValueError(
                f"{where}: architectures is {architectures!r}, expected 'DFlashDraftModel'"
            )
        both.only("hidden_act", "silu")
        both.only("attention_bias", False)
        with _naming(where):
            layers = both.whole("num_hidden_layers")
            if not 1 <= layers <= _MOST_LAYERS:
                raise ValueError(f"num_hidden_layers must lie in 1 .. {_MOST_LAYERS}, not {layers}")
            targets = both.whole("num_target_layers")
            return cls(
                **{name: both.whole(name) for name in _DRAFTER_INTEGERS},
                num_hidden_layers=layers,
                num_target_layers=targets,
                rms_norm_eps=both.number("rms_norm_eps"),
                rope=_rope(both),
                block_size=both.whole("block_size", 16),
                taps=both.optional("target_layer_ids", _ids) or default_taps(targets, layers),
                layers=_draft_layers(both, layers),
                input_embedding_scale=both.number("input_embedding_scale", 1.0),
                output_multiplier=both.number("output_multiplier", 1.0),
                final_logit_softcapping=both.optional("final_logit_softcapping", _number),
                initializer_range=both.number("initializer_range", 0.02),
            )


_DRAFTER_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "mask_token_id",
)


_DRAFTER_BOUNDS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, _MOST_LAYERS),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (1, 2**14),
    "max_position_embeddings": (1, 2**30),
    # The root and at least one mask; a tree is at most 31 deep.
    "block_size": (2, 32),
    "rms_norm_eps": (0, 1),
}


def default_taps(target_layers: int, taps: int) -> tuple[int, ...]:
    """DFlash's rule for a config without target_layer_ids: evenly spread, the ends spared."""
    if taps == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))


def _draft_layers(section: _Section, count: int) -> tuple[DraftLayer, ...]:
    """Window and causality of each layer; sliding layers are causal unless the config says."""
    causal = section.flag("causal", section.flag("is_causal", None))
    if section.flag("use_swa", False):
        window = section.whole("swa_window_size")
        return (DraftLayer(causal=bool(causal), window=window),) * count
    layers = []
    kinds = section.get("layer_types", ["full_attention"] * count)
    if not isinstance(kinds, list):
        raise ValueError(f"{section.where}: layer_types must be a list, not {kinds!r}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{section.where}: unknown layer type {kind!r}")
        sliding = kind == "sliding_attention"
        layers.append(
            DraftLayer(
                causal=sliding if causal is None else causal,
                window=section.whole("sliding_window") if sliding else None,
            )
        )
    return tuple(layers)
