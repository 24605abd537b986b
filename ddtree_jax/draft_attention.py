"""Attention of a drafter's block over its context and itself (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax import _checks, _ffi, few_rows
from ddtree_jax._primitive import kernel_primitive


def draft_attn(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    near_keys: jax.Array,
    near_values: jax.Array,
    visible: jax.Array,
) -> jax.Array:
    """softmax(query . keys / sqrt(D)) @ values, grouped-query, by a kernel in float32 on a CPU, else by XLA.

    XLA's CPU backend turns all of the context round for the sake of a few rows, filled or not; the kernel reads what
    is visible (docs/kernels/draft_attn.md).

    Args:
      query: [B, T, H, D] of the block's T slots, rotated.
      keys, values: [B, K, C, D] of the context; H is a multiple of K, and head h belongs to key head h // (H / K).
      near_keys, near_values: [B, T, K, D] of the block itself.
      visible: bool[B, T, C + T], the context's columns first; every slot sees something. Columns that no slot of a
        request sees are never part of a sum, whatever they hold.

    Returns:
      [B, T, H, D] in query's dtype; scores and sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not fit each other.
    """
    operands = _checked(query, keys, values, near_keys, near_values, visible)
    query = operands[0]
    floats = all(x.dtype == jnp.float32 for x in operands[:-1])
    if floats and query.shape[-1] <= _ffi.cpu.draft_attn_most_dim and few_rows.on_one_cpu():
        return _attend(*operands)
    return _plain(*operands)[0]


def _checked(query, keys, values, near_keys, near_values, visible) -> tuple[jax.Array, ...]:
    """The operands as arrays that fit each other."""
    floats = (jnp.float32, jnp.bfloat16)
    query = _checks.array("query", query, ("B", "T", "H", "D"), floats)
    batch, slots, heads, dim = query.shape
    keys = _checks.array("keys", keys, (batch, "K", "C", dim), floats)
    key_heads, columns = keys.shape[1:3]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"query's {heads} heads must be a multiple of the keys' {key_heads}")
    near = (batch, slots, key_heads, dim)
    return (
        query,
        keys,
        _checks.array("values", values, keys.shape, floats),
        _checks.array("near_keys", near_keys, near, floats),
        _checks.array("near_values", near_values, near, floats),
        _checks.array("visible", visible, (batch, slots, columns + slots), jnp.bool_),
    )


def _plain(query, keys, values, near_keys, near_values, visible):
    batch, slots, heads, dim = query.shape
    key_heads = keys.shape[1]
    grouped = query.reshape(batch, slots, key_heads, heads // key_heads, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    near = near_keys.swapaxes(1, 2), near_values.swapaxes(1, 2)
    # A weight of 0 is not enough: 0 * NaN is NaN.
    seen = jnp.split(jnp.any(visible, axis=1)[:, None, :, None], [keys.shape[2]], axis=2)
    parts = (
        (keys, jnp.where(seen[0], values, 0)),
        (near[0], jnp.where(seen[1], near[1], 0)),
    )
    # Scores, not keys, are joined: the context's arrays are read where they lie.
    scores = jnp.concatenate(
        [
            jnp.einsum("bkgtd,bksd->bkgts", grouped, own, preferred_element_type=jnp.float32)
            for own, _ in parts
        ],
        axis=-1,
    )
    scores = jnp.where(visible[:, None, None], scores * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(query.dtype)
    split = jnp.split(weights, [keys.shape[2]], axis=-1)
    mixed = sum(
        jnp.einsum("bkgts,bksd->bkgtd", weight, own)
        for weight, (_, own) in zip(split, parts, strict=True)
    )
    return [mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)]


@jax.custom_jvp
def _attend(*operands):
    return _draft_attn.bind(*operands, kernel=False)[0]


@_attend.defjvp
def _attend_jvp(primals, tangents):
    return jax.jvp(lambda *operands: _plain(*operands)[0], primals, tangents)


_draft_attn = kernel_primitive(
    "draft_attn",
    lambda query, *_, **__: [jax.ShapeDtypeStruct(query.shape, query.dtype)],
    batch_axes=(0,) * 6,
    result_batch_axes=(0,),
    # Programs traced here are lowered for CUDA too, to look at them.
    plain={"cuda": ("kernel", _plain)},
)
