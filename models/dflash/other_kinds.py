"""Tells a folder of another kind of drafter from a DFlash one: computed as DFlash, it would draft nonsense."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..common.fields import label, shown

#: Kind to what only its config.json says: in the architecture's name, and keys.
_CONFIGS = {
    "a DFlash2 drafter": (
        "dflash2",
        ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    ),
    "a DSpark drafter": (
        "dspark",
        (
            "confidence_head_with_markov",
            "dspark_block_size",
            "enable_confidence_head",
            "markov_head_type",
            "markov_rank",
            "use_confidence_head",
        ),
    ),
    "an EAGLE drafter": (
        "eagle",
        ("eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_output", "use_aux_norm"),
    ),
    "a Domino drafter": ("domino", ("gru_hidden_dim",)),
    "a LiLiCorr drafter": ("lilicorr", ("lilicorr_enabled",)),
    "a drafter in the form of speculators": ("speculator", ("transformer_layer_config",)),
}
#: Kind to what only its tensors are called.
_TENSORS = {
    "a DFlash2 drafter (a selector and convolutions)": re.compile(
        r"candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\."
    ),
    "a DSpark drafter (Markov or confidence head)": re.compile(
        r"markov_head\.|markov_w[12]\.|confidence_head\.|confidence_proj\."
    ),
    "a Domino drafter (a recurrent head)": re.compile(r"(prefix_gru|embed_proj)\."),
    "a LiLiCorr drafter (a head that ranks anew)": re.compile(r"lilicorr\."),
    "an EAGLE drafter": re.compile(r"fc_norm\.|layers\.\d+\.hidden_norm\.|midlayer\."),
    "a drafter over latent attention": re.compile(
        r"context_proj\.|layers\.\d+\.self_attn\.(kv_a_proj_with_mqa|kv_b_proj)\."
    ),
    "a drafter with a vocabulary of its own": re.compile(r"(d2t|t2d)$"),
    "a drafter with a head or an embedding of its own": re.compile(r"(lm_head|embed_tokens)\."),
}
_SERVED = "only DFlash drafters, which borrow the target's embedding and head, are supported"


def refuse_by_config(values: Mapping[str, Any], where: str):
    """Raises a ValueError that names the kind, when a config.json is another kind's.

    Args:
      values: its top level, with `dflash_config` laid over it.
      where: the file.
    """
    said = [values.get(k) for k in ("model_type", "speculators_model_type", "projector_type")]
    architectures = values.get("architectures")
    said += architectures if isinstance(architectures, list) else [architectures]
    names = [name for name in said if isinstance(name, str)]
    for kind, (part, keys) in _CONFIGS.items():
        named = next((name for name in names if part in name.lower()), None)
        key = next((key for key in keys if values.get(key) not in (None, False)), None)
        if named is not None or key is not None:
            told = f"it says {shown(named)}" if named is not None else f"it has the key {key!r}"
            raise ValueError(f"{where}: this is {kind} ({told}); {_SERVED}")


def refuse_by_tensors(folder: str | os.PathLike, names: Collection[str]):
    """Raises a ValueError that names the kind, when a folder's tensors are another kind's.

    Args:
      folder: for the message.
      names: of its tensors, without the prefix "model.".
    """
    for kind, pattern in _TENSORS.items():
        name = next((name for name in sorted(names) if pattern.match(name)), None)
        if name is not None:
            raise ValueError(
                f"{os.fspath(folder)}: this is {kind}, since it holds the tensor '{label(name)}'; {_SERVED}"
            )
