"""Packed experts over thousands of tokens: no kernel, `lax.ragged_dot` over experts dequantised in turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax import _checks
from ddtree_jax.experts import check_operands, unpack


def long_expert_mlp(
    x,
    expert_ids,
    expert_weights,
    gate_up,
    gate_up_scale,
    down,
    down_scale,
    *,
    experts_at_once: int = 32,
) -> jax.Array:
    """`expert_mlp` for long prefills, where arithmetic and not the weights' bytes sets the time.

    The choices are sorted by expert. A loop dequantises a few experts to x's dtype (32 of Kimi K2.6's are
    2.8 GB of bfloat16) and multiplies their choices as one ragged product. Experts that no token chose
    are dequantised too: with thousands of tokens there are none.

    Args:
      x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale: as `expert_mlp`.
      experts_at_once: at most so many are dequantised together.

    Returns:
      [T, D] in x's dtype, summed in float32 in the order of each token's choices.

    Raises:
      ValueError: as `expert_mlp`; `experts_at_once` no whole number from 1 on.
    """
    operands = check_operands(
        x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale
    )
    x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale = operands
    experts_at_once = _checks.between("experts_at_once", experts_at_once, 1, 2**31 - 1)
    experts, (tokens, top_k) = down.shape[0], expert_ids.shape
    pairs = tokens * top_k
    if pairs == 0 or experts == 0:
        return jnp.zeros_like(x)
    together = max(n for n in range(1, min(experts_at_once, experts) + 1) if experts % n == 0)

    chosen = (expert_ids >= 0) & (expert_ids < experts)
    ids = jnp.where(chosen, expert_ids, experts).reshape(-1)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    counts = jnp.bincount(ids, length=experts + 1)[:experts].astype(jnp.int32)
    ends = jnp.cumsum(counts)

    def few(array, first):
        return jax.lax.dynamic_slice_in_dim(array, first, together)

    def add(i, outputs):
        first = i * together
        sizes = few(counts, first)
        steps = jnp.arange(pairs, dtype=jnp.int32)
        # These experts' choices, moved to the front; what follows them belongs to none.
        begin = ends[first] - counts[first]
        own = order[(begin + steps) % pairs]
        inner = jax.lax.ragged_dot(
            x[own // top_k],
            unpack(few(gate_up, first), few(gate_up_scale, first), x.dtype).swapaxes(1, 2),
            sizes,
            preferred_element_type=jnp.float32,
        )
        gate, up = jnp.split(inner, 2, axis=-1)
        out = jax.lax.ragged_dot(
            (jax.nn.silu(gate) * up).astype(x.dtype),
            unpack(few(down, first), few(down_scale, first), x.dtype).swapaxes(1, 2),
            sizes,
            preferred_element_type=jnp.float32,
        )
        rows = jnp.where(steps < jnp.sum(sizes), own, pairs)
        return outputs.at[rows].set(out, mode="drop")

    outputs = jnp.zeros((pairs, x.shape[1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, experts // together, add, outputs)
    # A choice of no expert contributes nothing, whatever its weight is.
    shares = jnp.where(chosen, expert_weights, 0.0)
    return jnp.sum(outputs.reshape(tokens, top_k, -1) * shares[..., None], axis=1).astype(x.dtype)
