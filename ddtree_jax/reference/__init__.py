"""NumPy oracles, one per primitive: slow, plain, and written to be read as the definition."""

from ddtree_jax.reference.append_latents import append_latents
from ddtree_jax.reference.commit_path import commit_path
from ddtree_jax.reference.draft_topk import draft_topk
from ddtree_jax.reference.expert_mlp import expert_mlp
from ddtree_jax.reference.tree_accept import tree_accept
from ddtree_jax.reference.tree_build import tree_build
from ddtree_jax.reference.verify_attn import verify_attn

__all__ = [
    "append_latents",
    "commit_path",
    "draft_topk",
    "expert_mlp",
    "tree_accept",
    "tree_build",
    "verify_attn",
]
