"""One name for each tensor of a target, whatever the wrapper that a checkpoint was saved in."""

from __future__ import annotations

import re

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    # As some re-quantized folders have it.
    ("language_model.layers.", "model.layers."),
    ("language_model.embed_tokens.", "model.embed_tokens."),
    ("language_model.norm.", "model.norm."),
)
_NOT_LOADED = (
    "vision_tower.",
    "mm_projector.",
    "model.vision_tower.",
    "model.mm_projector.",
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def canonical(name: str) -> str | None:
    """`model.X` or `lm_head.X` for a stored name; None for the vision part and what is computed anew."""
    if name.startswith(_NOT_LOADED) or name.endswith("rotary_emb.inv_freq"):
        return None
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            return short + name[len(prefix) :]
    return name


def layer_of(name: str) -> int | None:
    """The 0-based layer of a canonical name; None outside of the layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None
