"""The mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ddtree_jax.experts import expert_mlp as packed_expert_mlp
from ddtree_jax.experts import sum_of_chosen

from . import fp8, quantization
from .deepseek_v3.config import KimiK26Config
from .layers import MLP, dot, gated_mlp, normal
from .placement import Placement


class Router(nnx.Module):
    """Sigmoid scores with a bias that chooses but does not weigh (`noaux_tc`), in float32."""

    def __init__(self, config: KimiK26Config, *, param_dtype, rngs: nnx.Rngs | None):
        shape = (config.hidden_size, config.n_routed_experts)
        self.kernel = nnx.Param(normal(shape, param_dtype, rngs, config.initializer_range))
        self.e_score_correction_bias = nnx.Param(jnp.zeros((config.n_routed_experts,), jnp.float32))
        self.config = config

    def scores(self, x: jax.Array) -> jax.Array:
        """Affinity of each token to each expert, [T, D] to f32[T, E] in 0 .. 1."""
        kernel = self.kernel[...]
        if x.dtype != jnp.float32:
            x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
        logits = dot(x, kernel, precision=jax.lax.Precision.HIGHEST)
        return jax.nn.sigmoid(logits)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, D] to expert ids i32[T, k] and weights f32[T, k]."""
        config = self.config
        scores = self.scores(x)
        choice = scores + self.e_score_correction_bias[...]
        if config.n_group > 1:
            grouped = choice.reshape(-1, config.n_group, config.n_routed_experts // config.n_group)
            best = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
            kept = jax.lax.top_k(best, config.topk_group)[1]
            allowed = jnp.any(kept[..., None] == jnp.arange(config.n_group), axis=1)
            choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
        ids = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return ids, weights * config.routed_scaling_factor


class Experts(nnx.Module):
    """The routed experts, stacked, as torch orients them (E experts, I inner, D model numbers).

    experts="float": `gate_up [E, 2I, D]`, gate rows before up rows, and `down [E, D, I]`.
    experts="fp8": `gate_up_fp8 [E, 2I, D]` and `down_fp8 [E, D, I]` in float8_e4m3fn, and for each
    matrix (gate and up apart) the scales of its blocks that `fp8.dequantize` takes,
    `gate_up_scale_inv f32[E, 2 * blocks(I), blocks(D)]`, `down_scale_inv f32[E, blocks(D), blocks(I)]`.
    experts="int4": the same as `quantization` packs it, `gate_up_packed i32[E, 2I, D / 8]` with
    `gate_up_scale bf16[E, 2I, D / 32]`, `down_packed i32[E, D, I / 8]` with
    `down_scale bf16[E, D, I / 32]`.
    """

    def __init__(self, config: KimiK26Config, *, param_dtype, rngs: nnx.Rngs | None, experts: str):
        count, size, inner = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        std = config.initializer_range
        gate_up = normal((count, 2 * inner, size), param_dtype, rngs, std)
        down = normal((count, size, inner), param_dtype, rngs, std)
        self.kind = experts
        if experts == "float":
            self.gate_up = nnx.Param(gate_up)
            self.down = nnx.Param(down)
            return
        if experts == "fp8":
            gate_up, scale = fp8.quantize(gate_up.reshape(count, 2, inner, size))
            self.gate_up_fp8 = PackedParam(gate_up.reshape(count, 2 * inner, size))
            self.gate_up_scale_inv = PackedParam(scale.reshape(count, -1, scale.shape[-1]))
            down, scale = fp8.quantize(down)
            self.down_fp8 = PackedParam(down)
            self.down_scale_inv = PackedParam(scale)
            return
        gate_up, gate_up_scale = quantization.quantize(gate_up)
        down, down_scale = quantization.quantize(down)
        self.gate_up_packed = PackedParam(quantization.pack(gate_up))
        self.gate_up_scale = PackedParam(gate_up_scale)
        self.down_packed = PackedParam(quantization.pack(down))
        self.down_scale = PackedParam(down_scale)

    @property
    def count(self) -> int:
        """How many there are; under `shard_map`, on one device."""
        held = {"float": "down", "fp8": "down_fp8", "int4": "down_packed"}
        return getattr(self, held[self.kind]).shape[0]

    def weights(self, expert: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
        """`gate_up [2I, D]` and `down [D, I]` of one expert, dequantized to `dtype`."""
        if self.kind == "float":
            return self.gate_up[...][expert].astype(dtype), self.down[...][expert].astype(dtype)
        if self.kind == "fp8":
            gate_up, scale = self.gate_up_fp8[...][expert], self.gate_up_scale_inv[...][expert]
            parts = (a.reshape(2, -1, a.shape[-1]) for a in (gate_up, scale))
            down, scale = self.down_fp8[...][expert], self.down_scale_inv[...][expert]
            return (
                fp8.dequantize(*parts, dtype).reshape(gate_up.shape),
                fp8.dequantize(down, scale, dtype),
            )
        return (
            quantization.dequantize(
                self.gate_up_packed[...][expert], self.gate_up_scale[...][expert], dtype
            ),
            quantization.dequantize(
                self.down_packed[...][expert], self.down_scale[...][expert], dtype
            ),
        )


class PackedParam(nnx.Variable):
    """A quantized weight or its scale: part of the model, not trained."""


def expert_mlp(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    """sum_j weights[t, j] * E_ids[t, j](x[t]), reading only experts that some token chose.

    Args:
      x: [T, D].
      ids: i32[T, k]; -1 contributes nothing.
      weights: f32[T, k].
      experts: the weights; packed ones go to the kernel of `ddtree_jax.expert_mlp`.

    Returns:
      [T, D] in x's dtype; the sum over experts is float32.
    """
    if experts.kind == "int4":
        return packed_expert_mlp(
            x,
            ids,
            weights,
            experts.gate_up_packed[...],
            experts.gate_up_scale[...],
            experts.down_packed[...],
            experts.down_scale[...],
        )
    return sum_of_chosen(
        x, ids, weights, experts.count, lambda expert: experts.weights(expert, x.dtype)
    )


def split_expert_mlp(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: Experts,
    shared: MLP | None,
    placement: Placement,
) -> jax.Array:
    """`expert_mlp` plus a shared MLP, each device with the experts and the inner units that it holds.

    Args:
      x, ids, weights, experts: as `expert_mlp`; all but the experts whole on every device.
      shared: an MLP that is split over the experts' mesh axis, or None.
      placement: the mesh and its rules.

    Returns:
      [T, D] in x's dtype, whole on every device. Each device's part of the routed sum and of the shared MLP
      is rounded to x's dtype once; they are added, and summed over the devices, in float32.
    """
    axis = placement.rules.experts

    def own(x, ids, weights, experts, kernels):
        if axis is not None:
            # Ids of the other devices' experts fall outside 0 .. count - 1, where they contribute nothing.
            ids = ids - jax.lax.axis_index(axis) * experts.count
            # Said of the input, so that a loop's first sum is of the type of its last: one for each device.
            x = jax.lax.pcast(x, axis, to="varying")
        out = expert_mlp(x, ids, weights, experts).astype(jnp.float32)
        if kernels:
            out = out + gated_mlp(x, *kernels).astype(jnp.float32)
        return (out if axis is None else jax.lax.psum(out, axis)).astype(x.dtype)

    kernels, specs, whole = (), (), PartitionSpec()
    if shared is not None:
        layers = (shared.gate_proj, shared.up_proj, shared.down_proj)
        kernels = tuple(layer.kernel[...] for layer in layers)
        specs = (PartitionSpec(None, axis), PartitionSpec(None, axis), PartitionSpec(axis))
    run = placement.on_each(own, (whole, whole, whole, PartitionSpec(axis), specs), whole)
    return run(x, ids, weights, experts, kernels)


def dense_expert_mlp(
    x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> jax.Array:
    """`expert_mlp` with every float expert applied to every token, for training."""
    share = _share(ids, weights, experts.count)
    gate_up = jnp.einsum("td,eid->tei", x, experts.gate_up[...].astype(x.dtype))
    gate, up = jnp.split(gate_up, 2, axis=-1)
    # The share goes in before the last product, which then sums over the experts as well. What overflows in an expert
    # must not reach a token that did not choose it.
    share = share[..., None].astype(x.dtype)
    inner = jnp.where(share == 0, 0, jax.nn.silu(gate) * up * share)
    return jnp.einsum("tei,edi->td", inner, experts.down[...].astype(x.dtype))


def _share(ids: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """Weight of each expert for each token, f32[T, E]; 0 where it was not chosen."""
    chosen = ids[..., None] == jnp.arange(count)
    return jnp.sum(jnp.where(chosen, weights[..., None], 0.0), axis=1)


class MoE(nnx.Module):
    """Routed experts plus the shared one, which every token visits without weight."""

    def __init__(self, config: KimiK26Config, *, param_dtype, rngs: nnx.Rngs | None, experts: str):
        self.gate = Router(config, param_dtype=param_dtype, rngs=rngs)
        self.experts = Experts(config, param_dtype=param_dtype, rngs=rngs, experts=experts)
        self.has_shared = config.n_shared_experts > 0
        if self.has_shared:
            inner = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = MLP(
                config.hidden_size,
                inner,
                param_dtype=param_dtype,
                rngs=rngs,
                std=config.initializer_range,
            )

    def __call__(
        self,
        x: jax.Array,
        valid: jax.Array | None = None,
        placement: Placement | None = None,
    ) -> jax.Array:
        """x [..., D]; `valid` bool[...] bars pad tokens from experts; None is differentiable."""
        shared = self.shared_experts if self.has_shared else None
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            ids, weights = self.gate(flat)
        with jax.named_scope("experts"):
            if valid is not None:
                ids = jnp.where(valid.reshape(-1, 1), ids, -1)
            if valid is None and self.experts.kind == "float":
                out = dense_expert_mlp(flat, ids, weights, self.experts)
            elif placement is None:
                out = expert_mlp(flat, ids, weights, self.experts)
            else:
                # Split alike, routed and shared experts end in one sum over devices.
                alike = placement.rules.inner == placement.rules.experts
                joined, shared = (shared, None) if alike else (None, shared)
                out = split_expert_mlp(flat, ids, weights, self.experts, joined, placement)
        if shared is not None:
            with jax.named_scope("shared_experts"):
                out = out + shared(flat)
        return out.reshape(x.shape)
