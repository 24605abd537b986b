"""The config.json of a DFlash drafter: the only source of its constants."""

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
from .other_kinds import refuse_by_config
from .windows import DraftLayer, read_layers

_MOST_LAYERS = 1024


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
        for name in ("final_logit_softcapping", "output_multiplier"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        check_bounds(self, _BOUNDS)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}: it is rotated in pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {shown(self.mask_token_id)} lies outside the vocabulary "
                f"{self.vocab_size}"
            )
        if not 1 <= len(self.taps) <= _MOST_LAYERS:
            raise ValueError(
                f"target_layer_ids must name 1 .. {_MOST_LAYERS} layers, not {len(self.taps)}"
            )
        for tap in self.taps:
            if not 0 <= tap < self.num_target_layers:
                raise ValueError(
                    f"target layer {shown(tap)} lies outside the target's "
                    f"{self.num_target_layers} layers"
                )
        if len(self.layers) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layers)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )

    @classmethod
    def from_json(cls, path_or_dict, *, ignore: Collection[str] = ()) -> DFlashConfig:
        """Reads a DFlashDraftModel config; `dflash_config` wins over the top level.

        Args:
          path_or_dict: the folder, the file, or its object.
          ignore: keys to take as absent; those of `dflash_config` may go without its name.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a needed key is missing, a value is one that this drafter does not compute, a key
            is not understood and could change what it computes, or another kind of drafter.
        """
        values, where = read_json(path_or_dict)
        nested = values.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise ValueError(f"{where}: dflash_config must be an object, not {shown(nested)}")
        values = {k: v for k, v in values.items() if k != "dflash_config"}
        values |= {k: v for k, v in (nested or {}).items() if v is not None}
        fields = Fields(values, where, ignore=ignored_keys(ignore))
        refuse_by_config(fields.values, where)
        architectures = fields.get("architectures", ["DFlashDraftModel"])
        if not isinstance(architectures, list) or "DFlashDraftModel" not in architectures:
            raise fields.error(
                "architectures", f"is {shown(architectures)}, expected 'DFlashDraftModel'"
            )
        with naming(where):
            config = cls(**_read(fields))
            fields.finish()
        return config

    def with_window(self, window: int) -> DFlashConfig:
        """The same drafter with a window of so many positions in every layer, whatever it had.

        Raises:
          ValueError: no number of positions.
        """
        layers = tuple(dataclasses.replace(layer, window=window) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)


_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "mask_token_id",
)


_BOUNDS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, _MOST_LAYERS),
    "num_target_layers": (1, _MOST_LAYERS),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (1, 2**14),
    "max_position_embeddings": (1, 2**30),
    # The root and at least one mask; a tree is at most 31 deep.
    "block_size": (2, 32),
    "rms_norm_eps": (0, 1),
    # float32 holds them and what they multiply.
    "initializer_range": (0, 1e12),
    "input_embedding_scale": (-1e12, 1e12),
    "output_multiplier": (1e-12, 1e12),
    "final_logit_softcapping": (1e-12, 1e12),
}


def _read(fields: Fields) -> dict:
    """The arguments of `DFlashConfig`."""
    layers = fields.whole("num_hidden_layers")
    if not 1 <= layers <= _MOST_LAYERS:
        raise fields.error(
            "num_hidden_layers", f"must lie in 1 .. {_MOST_LAYERS}, not {shown(layers)}"
        )
    targets = fields.whole("num_target_layers")
    if not 1 <= targets <= _MOST_LAYERS:
        raise fields.error(
            "num_target_layers", f"must lie in 1 .. {_MOST_LAYERS}, not {shown(targets)}"
        )
    sizes = {name: fields.whole(name) for name in _INTEGERS}
    fields.only("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "add_cross_attention", "is_encoder_decoder"):
        fields.only(key, False)
    fields.only("pruned_heads", {})
    fields.only("projector_type", "dflash")
    fields.only("attention_mode", "gqa", "mha")  # as num_key_value_heads says
    # With these the slots would predict other positions or ids, or see what no tensor here holds.
    for key in ("sample_from_anchor", "shift_label", "attention_sink_bias"):
        fields.only(key, False)
    fields.only("draft_vocab_size", sizes["vocab_size"])
    fields.only("target_hidden_size", sizes["hidden_size"])
    # It has neither embedding nor head to tie.
    fields.harmless(*harmless.ANYWHERE, "tie_word_embeddings", "is_decoder")
    taps = fields.get("target_layer_ids")
    try:
        taps = default_taps(targets, layers) if taps is None else whole_numbers(taps)
    except ValueError as error:
        raise fields.error("target_layer_ids", str(error)) from error
    return dict(
        **sizes,
        num_hidden_layers=layers,
        num_target_layers=targets,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields),
        block_size=fields.whole("block_size", 16),
        taps=taps,
        layers=read_layers(fields, layers),
        input_embedding_scale=fields.number("input_embedding_scale", 1.0),
        output_multiplier=fields.number("output_multiplier", 1.0),
        final_logit_softcapping=fields.number("final_logit_softcapping", None),
        initializer_range=fields.number("initializer_range", 0.02),
    )


def default_taps(target_layers: int, taps: int) -> tuple[int, ...]:
    """DFlash's rule for a config without target_layer_ids: evenly spread, the ends spared."""
    if taps == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))
