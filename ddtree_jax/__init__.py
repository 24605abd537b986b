"""DDTree speculative decoding as an XLA program: kernels, primitives and the decode loop.

Public names are imported when they are first asked for (PEP 562), so that `ddtree_jax.torch` does without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_jax.accept import AcceptedPath as AcceptedPath
    from ddtree_jax.accept import tree_accept as tree_accept
    from ddtree_jax.attention import verify_attn as verify_attn
    from ddtree_jax.budget import CostCurve as CostCurve
    from ddtree_jax.cache import append_latents as append_latents
    from ddtree_jax.cache import commit_path as commit_path
    from ddtree_jax.config import DecodeConfig as DecodeConfig
    from ddtree_jax.config import FinishReason as FinishReason
    from ddtree_jax.decode import DecodeResult as DecodeResult
    from ddtree_jax.decode import DecodeState as DecodeState
    from ddtree_jax.decode import ddtree_decode as ddtree_decode
    from ddtree_jax.experts import expert_mlp as expert_mlp
    from ddtree_jax.tree import DraftTree as DraftTree
    from ddtree_jax.tree import chain_tree as chain_tree
    from ddtree_jax.tree import draft_topk as draft_topk
    from ddtree_jax.tree import tree_build as tree_build

__version__ = "0.1.0"

#: Each public name and the submodule that defines it, as above.
_HOMES = {
    "AcceptedPath": "accept",
    "CostCurve": "budget",
    "DecodeConfig": "config",
    "DecodeResult": "decode",
    "DecodeState": "decode",
    "DraftTree": "tree",
    "FinishReason": "config",
    "append_latents": "cache",
    "chain_tree": "tree",
    "commit_path": "cache",
    "ddtree_decode": "decode",
    "draft_topk": "tree",
    "expert_mlp": "experts",
    "tree_accept": "accept",
    "tree_build": "tree",
    "verify_attn": "attention",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a checker would take every name for one of the module's

    def __getattr__(name: str):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
