"""A target and a drafter of Kimi K2.6's widths, or small ones for a CPU, with random numbers."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from published_configs import DRAFTER, TEXT

from ddtree_jax.models import DFlashConfig, DFlashDrafter, KimiK26, KimiK26Config

_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
_SMALL_DRAFTER = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dflash_config": {"mask_token_id": 511},
}
_TAPS = 6  # target layers that the published drafter reads


def target_config(full: bool, layers: int | None = None) -> KimiK26Config:
    """K2.6's, or the small one, with another number of layers if `layers` says so."""
    text = TEXT if full else {**TEXT, **_SMALL}
    return KimiK26Config.from_json(
        text if layers is None else {**text, "num_hidden_layers": layers}
    )


def drafter_config(full: bool, layers: int) -> DFlashConfig:
    """The published drafter's, or a small one, for a target of `layers` layers."""
    values = DRAFTER if full else {**DRAFTER, **_SMALL_DRAFTER}
    taps = {"target_layer_ids": [i * layers // _TAPS for i in range(_TAPS)]}
    dflash = {**values["dflash_config"], **taps}
    return DFlashConfig.from_json({**values, "num_target_layers": layers, "dflash_config": dflash})


def random_target(config: KimiK26Config, seed: int) -> KimiK26:
    """Packed experts of random words; all else normal in bfloat16."""
    return _filled(lambda: KimiK26(config, dtype=jnp.bfloat16), seed)


def random_drafter(config: DFlashConfig, seed: int) -> DFlashDrafter:
    return _filled(lambda: DFlashDrafter(config, dtype=jnp.bfloat16), seed)


def random_experts(experts: int, hidden: int, inner: int) -> tuple[jax.Array, ...]:
    """gate_up, gate_up_scale, down and down_scale of `ddtree_jax.expert_mlp`."""
    sizes = ((2 * inner, hidden), (hidden, inner))
    return tuple(
        _draw(jax.random.key(i, impl="rbg"), (experts, rows, inputs // each), dtype, "scale")
        for i, (rows, inputs) in enumerate(sizes)
        for each, dtype in ((8, "int32"), (32, "bfloat16"))
    )


def drafter_bytes(config: DFlashConfig) -> int:
    return _bytes(nnx.eval_shape(lambda: DFlashDrafter(config, dtype=jnp.bfloat16)))


def layer_bytes(config: KimiK26Config) -> tuple[int, int]:
    """Bytes of the target without its mixture layers, and of one of these."""
    dense = config.first_k_dense_replace
    one, two = (_target_bytes(config, dense + more) for more in (1, 2))
    return 2 * one - two, two - one


def _target_bytes(config: KimiK26Config, layers: int) -> int:
    short = dataclasses.replace(config, num_hidden_layers=layers)
    return _bytes(nnx.eval_shape(lambda: KimiK26(short, dtype=jnp.bfloat16)))


def _bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _filled(make, seed):
    """A model with every parameter drawn on the device, one after the other: no second copy is made."""
    graph, state = nnx.split(nnx.eval_shape(make))
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    values = []
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        kind = "norm" if "norm" in name else "scale" if "_scale" in name else "weight"
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), i)
        values.append(_draw(key, tuple(leaf.shape), jnp.dtype(leaf.dtype).name, kind))
    return nnx.merge(graph, jax.tree_util.tree_unflatten(structure, values))


def _without_low(words):
    """Packed int4 in which -8 became 0: numbers of mean -1/2 drive all tokens to one direction and few experts."""
    some = (words | words >> 1 | words >> 2 | words >> 3) & 0x11111111
    return words | (some ^ 0x11111111) << 3


def _draw_one(key, shape, dtype, kind):
    if dtype == "int32":
        return jax.lax.bitcast_convert_type(_without_low(jax.random.bits(key, shape)), jnp.int32)
    if kind == "norm":
        return jnp.ones(shape, dtype)
    if kind == "scale":
        return jax.random.uniform(key, shape, dtype, 0.003, 0.006)
    return jax.random.normal(key, shape, dtype) * 0.02


_draw = jax.jit(_draw_one, static_argnums=(1, 2, 3))
