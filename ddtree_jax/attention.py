"""The target's attention over a tree: every node over the cached prefix and its own ancestors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import _checks
from ddtree_jax._clib import path_number
from ddtree_jax._ffi import workspace_bytes
from ddtree_jax._primitive import kernel_primitive
from ddtree_jax.cache import ROW_DIM
from ddtree_jax.tree import MAX_BUDGET, DraftTree

LATENT_DIM = 512


def verify_attn(
    query,
    cache,
    lengths,
    tree: DraftTree,
    *,
    scale: float,
    layer,
    path: str = "auto",
    cache_scale=None,
) -> jax.Array:
    """Absorbed multi-head latent attention of a tree's nodes (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Node i of request b attends to cache rows 0 .. lengths[b] - 1 and to row lengths[b] + j of every
    ancestor j, itself included. A row past `tree.num_nodes` returns its own latent. Scores and sums are
    float32 whatever the dtype.

    Args:
      query: float32 or bfloat16 [B, N, H, 576]: the query absorbed into the latent space, 512 numbers,
        and its rotary part, 64.
      cache: [layers, B, S, 576] of the same dtype or float8_e4m3fn, the tree's own rows appended at `lengths`.
      lengths: i32[B], rows before the tree's; clamped to 0 .. S - N.
      tree: the tree; `ancestors` and `num_nodes` are read.
      scale: multiplies the scores.
      layer: which layer's rows to read, an int or an i32 scalar.
      path: which CUDA kernel serves bfloat16, for measurements and tests: "portable" runs on sm_80 and up,
        "hopper" on sm_90 alone, from a build for sm_90a, "auto" is "hopper" where that can be, else "portable".
        The CPU has one kernel.
      cache_scale: f32[layers] for a float8_e4m3fn cache: a number of the cache stands for itself times its
        layer's scale, which `append_latents` divided by. None means 1.

    Returns:
      [B, N, H, 512] in the query's dtype: weighted sums of latents, to be expanded per head.

    Raises:
      ValueError: another dtype, shape, layer or path, a scale for a cache of another dtype, or one that
        `append_latents` refuses; a `scale` that is not finite in float32.
      TypeError: `tree` is no `DraftTree`.
    """
    _checks.instance("tree", tree, DraftTree)
    floats = (jnp.float32, jnp.bfloat16)
    query = _checks.array("query", query, ("B", "N", "H", ROW_DIM), floats)
    batch, nodes, heads, _ = query.shape
    dtypes = (query.dtype, jnp.float8_e4m3fn)
    cache = _checks.array("cache", cache, ("layers", batch, "S", ROW_DIM), dtypes)
    path = path_number(path)
    lengths = _checks.array("lengths", lengths, (batch,), jnp.int32)
    _checks.between("query's nodes N", nodes, 1, MAX_BUDGET + 1)
    if heads < 1:
        raise ValueError("query must have at least one head")
    if cache.shape[2] < nodes:
        raise ValueError(f"cache holds {cache.shape[2]} rows, fewer than the tree's {nodes} nodes")
    words = (batch, nodes, -(-nodes // 32))
    ancestors = _checks.array("tree.ancestors", tree.ancestors, words, jnp.uint32)
    num_nodes = _checks.array("tree.num_nodes", tree.num_nodes, (batch,), jnp.int32)
    index = _checks.layer_index(layer, cache.shape[0])
    return _verify_attn.bind(
        query,
        cache,
        ancestors,
        lengths,
        num_nodes,
        index,
        _checks.cache_scale(cache_scale, cache),
        scale=_checks.float32("scale", scale),
        path=np.int32(path),
    )[0]


_verify_attn = kernel_primitive(
    "verify_attn",
    lambda query, *_, **__: [jax.ShapeDtypeStruct((*query.shape[:3], LATENT_DIM), query.dtype)],
    batch_axes=(0, 1, 0, 0, 0, None, None),
    result_batch_axes=(0,),
    attributes=("scale", "path"),
    workspace={
        "cuda": lambda query, cache, *_, **__: workspace_bytes(
            "verify_attn_workspace",
            query.shape[0],
            cache.shape[2],
            *query.shape[1:3],
            int(query.dtype == jnp.bfloat16),
        )
    },
)
