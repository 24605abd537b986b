"""The config.json of a Kimi K2 or DeepSeek-V3 target: the only source of its constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from ..common import harmless
from ..common.fields import (
    Fields,
    check_bounds,
    ignored_keys,
    naming,
    read_json,
    shown,
    whole_numbers,
)
from ..common.rope_fields import read_rope
from ..rope import RopeConfig
from .quantization_config import read_quantization

LATENT_DIM = 512  # what the kernels serve: see ffi/ddtree.h
ROPE_DIM = 64
_MOST_LAYERS = 1024
_MOST_TOKEN_ID = 2**31 - 1


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
        check_bounds(self, _BOUNDS)
        for name, served in (("kv_lora_rank", LATENT_DIM), ("qk_rope_head_dim", ROPE_DIM)):
            if getattr(self, name) != served:
                raise ValueError(
                    f"{name} must be {served} (what the kernels serve), "
                    f"not {shown(getattr(self, name))}"
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
                f"not {shown(self.num_experts_per_tok)}"
            )
        for token in self.eos_token_ids:
            if not 0 <= token <= _MOST_TOKEN_ID:
                raise ValueError(
                    f"eos_token_id must lie in 0 .. {_MOST_TOKEN_ID}, not {shown(token)}"
                )

    @classmethod
    def from_json(cls, path_or_dict, *, ignore: Collection[str] = ()) -> KimiK26Config:
        """Reads a kimi_k25 wrapper (its `text_config`) or a flat kimi_k2 / deepseek_v3 config.

        Args:
          path_or_dict: the folder, the file, or its object.
          ignore: keys to take as absent, nested ones by their path ("rope_scaling.truncate"); those
            of a wrapper's `text_config` may go without its name.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a needed key is missing, a value is one that this model does not compute, or a
            key is not understood and could change what it computes.
        """
        values, where = read_json(path_or_dict)
        ignore = ignored_keys(ignore)
        outer = Fields(values, where, ignore=ignore)
        text = outer
        if "text_config" in outer.values:
            inner = outer.get("text_config")
            if not isinstance(inner, Mapping):
                raise outer.error("text_config", f"must be an object, not {shown(inner)}")
            text = Fields(inner, f"{where} (text_config)", ignore=ignore)
            outer.only("model_type", "kimi_k25", "kimi_vl")
        with naming(text.where):
            config = cls(**_read(text, outer))
            text.finish()
            if text is not outer:
                _finish_wrapper(outer, text)
        return config

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based `layer` routes to experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def softmax_scale(self) -> float:
        """(qk_nope + qk_rope)^-0.5 times YaRN's squared mscale."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_factor


_INTEGERS = (
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


_BOUNDS = {
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
    # float32 holds them and what they multiply.
    "routed_scaling_factor": (-1e12, 1e12),
    "initializer_range": (0, 1e12),
}

#: Sizes that transformers derives or names twice: latent attention has no heads of keys.
_DERIVED = ("head_dim", "num_key_value_heads", "qk_head_dim")
#: Of the wrapper: the vision part, which is not loaded, and the tokens that stand for pictures.
_VISION = (
    "ignore_index",
    "image_token_id",
    "media_placeholder_token_id",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "use_unified_vision_chunk",
    "video_placeholder",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)


def _read(text: Fields, outer: Fields) -> dict:
    """The arguments of `KimiK26Config`."""
    text.only("model_type", "kimi_k2", "deepseek_v3")
    text.only("hidden_act", "silu")
    text.only("scoring_func", "sigmoid")
    text.only("topk_method", "noaux_tc")
    for key in ("attention_bias", "mlp_bias", "add_cross_attention", "is_encoder_decoder"):
        text.only(key, False)
    text.only("rope_interleave", True)
    text.only("pruned_heads", {})
    text.harmless(*harmless.ANYWHERE, *_DERIVED, "is_decoder")
    text.need("q_lora_rank")  # null is an answer, silence is not
    sizes = {name: text.whole(name) for name in _INTEGERS}
    text.only("num_local_experts", sizes["n_routed_experts"])  # transformers' other name
    extra = text.whole("num_mtp_layers", 0)  # likewise
    read = dict(
        **sizes,
        q_lora_rank=text.whole("q_lora_rank", None),
        n_shared_experts=text.whole("n_shared_experts", 0),
        num_nextn_predict_layers=text.whole("num_nextn_predict_layers", extra),
        n_group=text.whole("n_group", 1),
        topk_group=text.whole("topk_group", 1),
        norm_topk_prob=text.flag("norm_topk_prob", True),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        moe_layer_freq=text.whole("moe_layer_freq", 1),
        rms_norm_eps=text.number("rms_norm_eps"),
        rope=read_rope(text),
        latent_norm_eps=text.number("latent_norm_eps", 1e-6),
        tie_word_embeddings=text.flag(
            "tie_word_embeddings", outer.flag("tie_word_embeddings", False)
        ),
        initializer_range=text.number("initializer_range", 0.02),
        eos_token_ids=_eos(text) or _eos(outer),
    )
    # Before the quantization's names of layers are gone through: none is made of a size that no model has.
    unquantized = KimiK26Config(**read)
    return {**read, "experts": _experts(text, outer, unquantized)}


def _eos(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    try:
        return () if value is None else whole_numbers(value)
    except ValueError as error:
        raise fields.error("eos_token_id", str(error)) from error


def _experts(text: Fields, outer: Fields, config: KimiK26Config) -> str:
    # transformers writes it into the wrapper, Moonshot into its text_config.
    here, there = text.section("quantization_config"), outer.section("quantization_config")
    if here is not None and there is not None and here.values != there.values:
        raise outer.error("quantization_config", "differs from the one in text_config")
    found = there if here is None else here
    return "float" if found is None else read_quantization(found, config)


def _finish_wrapper(outer: Fields, text: Fields):
    """Refuses what the wrapper says and nobody asked for, unless `text_config` says the same."""
    repeated = [k for k, v in outer.values.items() if k in text.values and text.values[k] == v]
    outer.harmless(*harmless.ANYWHERE, *_VISION, *repeated)
    outer.only("is_encoder_decoder", False)
    outer.finish()
