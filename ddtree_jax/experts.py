"""Routed experts with packed int4 weights, as Kimi K2.6's checkpoint holds them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax import _checks
from ddtree_jax._ffi import workspace_bytes
from ddtree_jax._primitive import kernel_primitive

GROUP = 32  # inputs that share a scale
PER_WORD = 8  # weights in a word
MAX_CUDA_EXPERTS = 2048  # that the CUDA kernel can sort by
#: Whether `expert_mlp` runs its kernel on CUDA when the caller does not say.
CUDA_KERNEL = True


def expert_mlp(
    x,
    expert_ids,
    expert_weights,
    gate_up,
    gate_up_scale,
    down,
    down_scale,
    *,
    cuda_kernel: bool | None = None,
) -> jax.Array:
    """sum_j expert_weights[t, j] * E(x[t]) with E = expert_ids[t, j] and E(x) = down(silu(gate x) * up x).

    T tokens, D model numbers, k experts a token, E experts, I inner numbers. A word of packed weights holds
    eight inputs, the first in the lowest nibble, as q + 8; q stands for q * scale of its 32 inputs
    (compressed-tensors, `pack-quantized`). Only experts that some token chose are read. This is a kernel; on
    CUDA it can be plain JAX instead, a scan over the experts, 17 to 23 times slower at K2.6's widths.

    Args:
      x: float32 or bfloat16 [T, D].
      expert_ids: i32[T, k]; an id outside 0 .. E - 1 contributes nothing.
      expert_weights: f32[T, k].
      gate_up: i32[E, 2I, D / 8], gate rows before up rows.
      gate_up_scale: bf16[E, 2I, D / 32].
      down: i32[E, D, I / 8].
      down_scale: bf16[E, D, I / 32].
      cuda_kernel: on CUDA, run the kernel; by default if `CUDA_KERNEL` and E is at most 2048, as it must be.

    Returns:
      [T, D] in x's dtype, summed in float32.

    Raises:
      ValueError: another dtype or shape; D or I no multiple of 32.
      NotImplementedError: `cuda_kernel` on CUDA in a build without CUDA kernels.
    """
    operands = check_operands(
        x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale
    )
    if cuda_kernel is None:
        cuda_kernel = CUDA_KERNEL and operands[5].shape[0] <= MAX_CUDA_EXPERTS
    else:
        cuda_kernel = _checks.flag("cuda_kernel", cuda_kernel)
    return _expert_mlp.bind(*operands, cuda_kernel=cuda_kernel)[0]


def check_operands(
    x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale
) -> tuple[jax.Array, ...]:
    """The operands of `expert_mlp` as arrays.

    Raises:
      ValueError: another dtype or shape; D or I no multiple of 32.
    """
    x = _checks.array("x", x, ("T", "D"), (jnp.float32, jnp.bfloat16))
    tokens, hidden = x.shape
    expert_ids = _checks.array("expert_ids", expert_ids, (tokens, "k"), jnp.int32)
    expert_weights = _checks.array("expert_weights", expert_weights, expert_ids.shape, jnp.float32)
    down = _checks.array("down", down, ("E", hidden, "I / 8"), jnp.int32)
    experts, inner = down.shape[0], down.shape[2] * PER_WORD
    if hidden % GROUP or inner % GROUP:
        raise ValueError(f"D and I must be multiples of {GROUP}, not {hidden} and {inner}")
    shape = (experts, 2 * inner, hidden // PER_WORD)
    gate_up = _checks.array("gate_up", gate_up, shape, jnp.int32)
    shape = (experts, 2 * inner, hidden // GROUP)
    gate_up_scale = _checks.array("gate_up_scale", gate_up_scale, shape, jnp.bfloat16)
    shape = (experts, hidden, inner // GROUP)
    down_scale = _checks.array("down_scale", down_scale, shape, jnp.bfloat16)
    return x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale


def _scan_over_experts(x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale):
    """The same in plain JAX."""

    def matrices(expert):
        return (
            unpack(gate_up[expert], gate_up_scale[expert], x.dtype),
            unpack(down[expert], down_scale[expert], x.dtype),
        )

    return [sum_of_chosen(x, expert_ids, expert_weights, down.shape[0], matrices)]


def sum_of_chosen(x, expert_ids, expert_weights, experts: int, matrices) -> jax.Array:
    """`expert_mlp` over any kind of weights, expert by expert; one that no token chose is not touched.

    Args:
      x: [T, D].
      expert_ids: i32[T, k]. expert_weights: f32[T, k].
      experts: how many there are.
      matrices: from an expert's index i32[] to its `gate_up [2I, D]` and `down [D, I]` in x's dtype.

    Returns:
      [T, D] in x's dtype; the sum is float32.
    """
    # 0, or below where nothing was chosen, but XLA does not see that: it turns slices at a loop's own
    # counter into copies that no CUDA graph takes, and then the decode loop around is not captured either.
    zero = jnp.minimum(jnp.max(expert_ids, initial=-1), 0)

    def add(i, total):
        expert = jnp.clip(i + zero, 0, experts - 1)

        def apply(total):
            gate_up, down = matrices(expert)
            gate, up = jnp.split(x @ gate_up.T, 2, axis=-1)
            out = jnp.dot(jax.nn.silu(gate) * up, down.T, preferred_element_type=jnp.float32)
            chosen = expert_ids == expert
            share = jnp.sum(jnp.where(chosen, expert_weights, 0.0), axis=-1)[:, None]
            # Not 0 * out: what overflows or is NaN must not reach a token that did not choose it.
            return total + jnp.where(jnp.any(chosen, axis=-1, keepdims=True), share * out, 0.0)

        return jax.lax.cond(jnp.any(expert_ids == expert), apply, lambda total: total, total)

    total = jax.lax.fori_loop(0, experts, add, jnp.zeros_like(x, jnp.float32))
    return total.astype(x.dtype)


def unpack(words, scales, dtype) -> jax.Array:
    """Words i32[..., inputs / 8] and scales [..., inputs / 32] to weights [..., inputs] of `dtype`."""
    nibbles = (words[..., None] >> (4 * jnp.arange(PER_WORD, dtype=jnp.int32))) & 15
    values = (nibbles - 8).astype(dtype).reshape(*scales.shape, GROUP)
    return (values * scales[..., None].astype(dtype)).reshape(*words.shape[:-1], -1)


def _cuda_workspace(x, ids, shares, gate_up, gate_up_scale, down, down_scale, **_):
    sizes = (*ids.shape, down.shape[0], x.shape[1], down.shape[2] * PER_WORD)
    return workspace_bytes("expert_mlp_workspace", *sizes, int(x.dtype == jnp.bfloat16))


_expert_mlp = kernel_primitive(
    "expert_mlp",
    lambda x, *_, cuda_kernel: [jax.ShapeDtypeStruct(x.shape, x.dtype)],
    batch_axes=(0, 0, 0, None, None, None, None),
    result_batch_axes=(0,),
    workspace={
        # Each chosen expert's output for each token, before they are weighed and summed.
        "cpu": lambda x, ids, *_, **__: 4 * ids.size * x.shape[1],
        "cuda": _cuda_workspace,
    },
    plain={"cuda": ("cuda_kernel", _scan_over_experts)},
)
