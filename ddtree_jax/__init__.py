"""DDTree speculative decoding as an XLA program: kernels, primitives and the decode loop."""

from ddtree_jax.accept import AcceptedPath, tree_accept
from ddtree_jax.attention import verify_attn
from ddtree_jax.budget import CostCurve
from ddtree_jax.cache import append_latents, commit_path
from ddtree_jax.config import DecodeConfig, FinishReason
from ddtree_jax.decode import DecodeResult, DecodeState, ddtree_decode
from ddtree_jax.experts import expert_mlp
from ddtree_jax.tree import DraftTree, chain_tree, draft_topk, tree_build

__version__ = "0.1.0"

__all__ = [
    "AcceptedPath",
    "CostCurve",
    "DecodeConfig",
    "DecodeResult",
    "DecodeState",
    "DraftTree",
    "FinishReason",
    "append_latents",
    "chain_tree",
    "commit_path",
    "ddtree_decode",
    "draft_topk",
    "expert_mlp",
    "tree_accept",
    "tree_build",
    "verify_attn",
]
