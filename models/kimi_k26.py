"""The Kimi K2.6 text model: DeepSeek-V3's latent attention and mixture of experts.

Two forms of the same attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): `forward` expands the
latents to keys and values of every head, which suits long sequences and training; `verify` absorbs
the expansion into the queries and reads the latent cache as it is, 576 numbers a row, which suits
few rows over a long context.

Names follow the checkpoint's; linear kernels are [inputs, outputs].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.attention import verify_attn
from ddtree_jax.cache import append_latents
from ddtree_jax.tree import DraftTree

from . import rope
from .deepseek_v3.config import LATENT_DIM, ROPE_DIM, KimiK26Config
from .layers import MLP, Linear, RMSNorm, dot, float_dtype, normal
from .moe import MoE
from .placement import Placement

# Up to so many rows are copied one by one: XLA's CPU backend gathers them number by number.
_FEW_TOKENS = 40


class LatentUp(nnx.Module):
    """kv_b_proj in two, for the absorbed form: `k_up [H, qk_nope, 512]`, `v_up [H, 512, v]`."""

    def __init__(self, config: KimiK26Config, *, param_dtype, rngs: nnx.Rngs | None):
        heads, std = config.num_attention_heads, config.initializer_range
        self.k_up = nnx.Param(
            normal((heads, config.qk_nope_head_dim, LATENT_DIM), param_dtype, rngs, std)
        )
        self.v_up = nnx.Param(
            normal((heads, LATENT_DIM, config.v_head_dim), param_dtype, rngs, std)
        )


class Attention(nnx.Module):
    """Multi-head latent attention."""

    def __init__(self, config: KimiK26Config, *, param_dtype, rngs: nnx.Rngs | None):
        size, heads = config.hidden_size, config.num_attention_heads
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim

        def linear(inputs, outputs):
            return Linear(
                inputs, outputs, param_dtype=param_dtype, rngs=rngs, std=config.initializer_range
            )

        if config.q_lora_rank is None:
            self.q_proj = linear(size, heads * head_dim)
        else:
            self.q_a_proj = linear(size, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(
                config.q_lora_rank, config.latent_norm_eps, param_dtype=param_dtype
            )
            self.q_b_proj = linear(config.q_lora_rank, heads * head_dim)
        self.kv_a_proj_with_mqa = linear(size, LATENT_DIM + ROPE_DIM)
        self.kv_a_layernorm = RMSNorm(LATENT_DIM, config.latent_norm_eps, param_dtype=param_dtype)
        self.kv_b_proj = LatentUp(config, param_dtype=param_dtype, rngs=rngs)
        self.o_proj = linear(heads * config.v_head_dim, size)
        self.config = config

    def queries(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] to the plain part [B, T, H, qk_nope] and the rotated part [B, T, H, 64]."""
        if self.config.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.reshape(*x.shape[:2], self.config.num_attention_heads, -1)
        plain, rotary = jnp.split(query, [self.config.qk_nope_head_dim], axis=-1)
        return plain, rope.rotate_pairs(rotary, cos[:, :, None], sin[:, :, None])

    def latents(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x [B, T, D] to cache rows [B, T, 576]: the normed latent, then the shared rotated key."""
        latent, rotary = jnp.split(self.kv_a_proj_with_mqa(x), [LATENT_DIM], axis=-1)
        return jnp.concatenate(
            [self.kv_a_layernorm(latent), rope.rotate_pairs(rotary, cos, sin)], axis=-1
        )

    def absorbed_queries(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x [B, T, D] to queries [B, T, H, 576] that meet cache rows as they are."""
        plain, rotary = self.queries(x, cos, sin)
        absorbed = _per_head(plain, self.kv_b_proj.k_up[...])
        return jnp.concatenate([absorbed, rotary], axis=-1)

    def project(self, mixed: jax.Array) -> jax.Array:
        """Mixed latents [B, T, H, 512] to [B, T, D]."""
        values = _per_head(mixed, self.kv_b_proj.v_up[...])
        return self.o_proj(values.reshape(*mixed.shape[:2], -1))

    def causal(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Expanded attention of [B, T, D] over itself; row t sees rows 0 .. t."""
        plain, rotary = self.queries(x, cos, sin)
        latent, shared_key = jnp.split(self.latents(x, cos, sin), [LATENT_DIM], axis=-1)
        k_up, v_up = (up[...].astype(x.dtype) for up in (self.kv_b_proj.k_up, self.kv_b_proj.v_up))
        keys = jnp.einsum("btr,hdr->bthd", latent, k_up)
        values = jnp.einsum("btr,hrv->bthv", latent, v_up)
        scores = jnp.einsum("bthd,bshd->bhts", plain, keys, preferred_element_type=jnp.float32)
        scores += jnp.einsum(
            "bthd,bsd->bhts", rotary, shared_key, preferred_element_type=jnp.float32
        )
        steps = jnp.arange(x.shape[1])
        scores = jnp.where(steps[:, None] >= steps, scores * self.config.softmax_scale, -jnp.inf)
        # A weight of 0 is not enough to keep a later row out: 0 * NaN is NaN.
        finite = jnp.all(jnp.isfinite(values), axis=(2, 3))[..., None, None]
        values = jnp.where(finite, values, 0)
        mixed = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores).astype(x.dtype), values)
        mixed = jnp.where(jnp.cumsum(~finite, axis=1) == 0, mixed, jnp.nan)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


def _per_head(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[B, T, H, m] times [H, m, n], head by head, to [B, T, H, n].

    Heads are moved to the front by hand: left to an einsum, XLA's CPU backend takes three times as long.
    """
    batch, length, heads, size = x.shape
    rows = x.transpose(2, 0, 1, 3).reshape(heads, batch * length, size)
    out = dot(rows, kernel).reshape(heads, batch, length, kernel.shape[-1])
    return out.transpose(1, 2, 0, 3)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and pre-norm MLP or mixture of experts, each with a residual."""

    def __init__(
        self, config: KimiK26Config, layer: int, *, param_dtype, rngs: nnx.Rngs | None, experts: str
    ):
        self.input_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype
        )
        self.self_attn = Attention(config, param_dtype=param_dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype
        )
        self.is_moe = config.is_moe(layer)
        if self.is_moe:
            self.mlp = MoE(config, param_dtype=param_dtype, rngs=rngs, experts=experts)
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.intermediate_size,
                param_dtype=param_dtype,
                rngs=rngs,
                std=config.initializer_range,
            )

    def feed_forward(
        self,
        x: jax.Array,
        valid: jax.Array | None = None,
        placement: Placement | None = None,
    ) -> jax.Array:
        """Adds the second half of the layer to the residual stream [B, T, D]."""
        normed = self.post_attention_layernorm(x)
        with jax.named_scope("moe" if self.is_moe else "mlp"):
            return x + (self.mlp(normed, valid, placement) if self.is_moe else self.mlp(normed))


def latent_cache_dtype(cache_dtype, dtype):
    """The dtype of a latent cache: that of the model by default, else float8_e4m3fn.

    Raises:
      ValueError: another dtype.
    """
    dtype = jnp.dtype(dtype)
    try:
        wanted = dtype if cache_dtype is None else jnp.dtype(cache_dtype)
    except TypeError as error:
        raise ValueError(f"cache_dtype: {cache_dtype!r} is no dtype") from error
    if wanted not in (dtype, jnp.float8_e4m3fn):
        raise ValueError(
            f"cache_dtype must be the model's {dtype.name} or float8_e4m3fn, not {wanted.name}"
        )
    return wanted


class KimiK26(nnx.Module):
    """The text model. B requests, T tokens, D hidden_size, V vocab_size.

    Args:
      config: sizes and constants.
      dtype: of the activations and, but for `cache_dtype`, of the cache; float32 or bfloat16.
      param_dtype: of the parameters, as flax tells the two apart; `dtype` by default. In bfloat16 under float32
        they take half the memory, and products are float32's over the rounded weights. Packed experts with their
        scales and the router's bias are as they are whatever this is.
      rngs: source of random parameters; without it they are zero.
      experts: "float", "fp8" or "int4", how the routed experts are held; the config's way by default.
      cache_dtype: dtype of the latent cache: float8_e4m3fn takes half of bfloat16's bytes; the model's
        own by default.
      cache_scale: for such a cache, what its numbers are multiplied with, one for each layer; 1 by
        default. A latent is RMS-normalised, so that no number of it exceeds sqrt(512) = 22.6 times the
        norm's weight, far within e4m3's 448, and most of them lie where e4m3 keeps its full three bits.
        The 64 rotary numbers are not normalised: a layer where they pass 448 wants a scale.
      placement: the mesh that the parameters lie on, and how; `load_target(mesh=...)` puts them there. One
        device by default.
    """

    def __init__(
        self,
        config: KimiK26Config,
        *,
        dtype=jnp.bfloat16,
        param_dtype=None,
        rngs: nnx.Rngs | None = None,
        experts: str | None = None,
        cache_dtype=None,
        cache_scale: tuple[float, ...] | None = None,
        placement: Placement | None = None,
    ):
        experts = config.experts if experts is None else experts
        if experts not in ("float", "fp8", "int4"):
            raise ValueError(f"experts must be 'float', 'fp8' or 'int4', not {experts!r}")
        self.dtype = float_dtype("dtype", dtype)
        param_dtype = float_dtype("param_dtype", dtype if param_dtype is None else param_dtype)
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(normal(shape, param_dtype, rngs, config.initializer_range))
        self.layers = nnx.List(
            DecoderLayer(config, layer, param_dtype=param_dtype, rngs=rngs, experts=experts)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size,
                config.vocab_size,
                param_dtype=param_dtype,
                rngs=rngs,
                std=config.initializer_range,
            )
        self.config = config
        wanted = latent_cache_dtype(cache_dtype, dtype)
        self._rounds_cache = wanted == jnp.float8_e4m3fn
        if cache_scale is not None:
            if not self._rounds_cache:
                raise ValueError("cache_scale is for cache_dtype float8_e4m3fn: leave it out")
            try:
                cache_scale = tuple(float(scale) for scale in cache_scale)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"cache_scale must be a tuple of numbers, not {cache_scale!r}"
                ) from error
            if len(cache_scale) != config.num_hidden_layers:
                raise ValueError(
                    f"cache_scale must have a number for each of {config.num_hidden_layers} layers, "
                    f"not {len(cache_scale)}"
                )
            # float32 holds them, and a subnormal one may count as zero there.
            low, high = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)
            if not all(low <= scale <= high for scale in cache_scale):
                raise ValueError(
                    f"cache_scale must be finite and above 0 in float32, {low:.2g} .. {high:.2g}, not {cache_scale}"
                )
        self.cache_scale = cache_scale
        self.placement = placement

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_context(self) -> int:
        """Positions that the rotary embedding was made for."""
        return self.config.max_position_embeddings

    @property
    def vocab_is_split(self) -> bool:
        """Whether embedding and logits lie over several devices, each with its own tokens."""
        return self.placement is not None and self.placement.rules.vocab is not None

    @property
    def cache_dtype(self):
        """Dtype of the latent cache."""
        return jnp.dtype(jnp.float8_e4m3fn) if self._rounds_cache else self.dtype

    def embed(self, tokens: jax.Array) -> jax.Array:
        """i32[...] to [..., D] of `dtype`; ids outside the vocabulary are clamped."""
        return self._embedding_rows(tokens).astype(self.dtype)

    def _embedding_rows(self, tokens: jax.Array) -> jax.Array:
        table = self.embed_tokens[...]
        if self.vocab_is_split:
            return self.placement.embed(table, jnp.clip(tokens, 0, table.shape[0] - 1))
        on_cpu = jax.default_backend() == "cpu" and self.placement is None
        if not on_cpu or not 0 < tokens.size <= _FEW_TOKENS:
            return jnp.take(table, tokens, axis=0, mode="clip")
        rows = [
            jax.lax.dynamic_slice_in_dim(table, token, 1)
            for token in jnp.maximum(tokens, 0).reshape(-1)
        ]
        return jnp.concatenate(rows).reshape(*tokens.shape, -1)

    def head(self, hidden: jax.Array) -> jax.Array:
        """[..., D] after the final norm to logits f32[..., V]."""
        if self.config.tie_word_embeddings:
            table = self.embed_tokens[...].astype(hidden.dtype)
            return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
        return dot(hidden, self.lm_head.kernel[...], preferred_element_type=jnp.float32)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits f32[B, T, V] of a plain causal pass over i32[B, T] tokens and positions."""
        return self.head(self.forward(tokens, positions)[0])

    def forward(
        self, tokens: jax.Array, positions: jax.Array, *, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """A plain causal pass without a cache, differentiable.

        Args:
          tokens, positions: i32[B, T]; row t sees rows 0 .. t whatever the positions.
          taps: 0-based layers whose outputs to return.

        Returns:
          hidden [B, T, D] after the final norm, and features [B, T, len(taps) * D]: the residual
          stream after each of those layers, concatenated in the order of `taps`.
        """
        x = self.embed(tokens)
        cos, sin = rope.cos_sin(self.config.rope, ROPE_DIM, positions, x.dtype)
        outputs = []
        for layer in self.layers:
            with jax.named_scope("attention"):
                x = x + layer.self_attn.causal(layer.input_layernorm(x), cos, sin)
            x = layer.feed_forward(x, placement=self.placement)
            outputs.append(x)
        return self.norm(x), _tapped(outputs, taps)

    def init_cache(self, batch: int, rows: int) -> jax.Array:
        """An empty latent cache [layers, batch, rows, 576] of `cache_dtype`."""
        shape = (self.num_layers, batch, rows, LATENT_DIM + ROPE_DIM)
        cache = jnp.zeros(shape, self.cache_dtype)
        if self.placement is None:
            return cache
        return jax.lax.with_sharding_constraint(cache, self.placement.whole)

    def verify(
        self, tree: DraftTree, cache: jax.Array, lengths: jax.Array, *, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scores every node of a draft tree in one pass, each seeing the context and its ancestors.

        Args:
          tree: `ddtree_jax.DraftTree` of N nodes.
          cache: from `init_cache`, [layers, B, S, 576], `lengths` rows of it in use; updated in place under jit.
          lengths: i32[B]; the tree's rows go to lengths .. lengths + N - 1, a node's position is
            lengths + its depth.
          taps: 0-based layers whose outputs to return.

        Returns:
          hidden [B, N, D] after the final norm, features [B, N, len(taps) * D] as in `forward`, and
          the cache. Rows past `tree.num_nodes` mean nothing and visit no routed expert.

        Raises:
          TypeError: `tree` is no `DraftTree`.
        """
        if not isinstance(tree, DraftTree):
            raise TypeError(f"tree must be a DraftTree, not {type(tree).__name__}")
        attend = verify_attn if self.placement is None else self.placement.verify_attn
        x = self.embed(tree.tokens)
        positions = lengths[:, None] + tree.depths
        valid = jnp.arange(tree.tokens.shape[1]) < tree.num_nodes[:, None]
        cos, sin = rope.cos_sin(self.config.rope, ROPE_DIM, positions, x.dtype)
        scale = self.config.softmax_scale
        scaled = {}
        if self.cache_scale is not None:
            scaled = {"cache_scale": jnp.asarray(self.cache_scale, jnp.float32)}
        outputs = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope("attention"):
                normed = layer.input_layernorm(x)
                rows = layer.self_attn.latents(normed, cos, sin)
                cache = append_latents(cache, rows, lengths, layer=index, **scaled)
                query = layer.self_attn.absorbed_queries(normed, cos, sin)
                mixed = attend(query, cache, lengths, tree, scale=scale, layer=index, **scaled)
                x = x + layer.self_attn.project(mixed)
            x = layer.feed_forward(x, valid, self.placement)
            outputs.append(x)
        return self.norm(x), _tapped(outputs, taps), cache


def _tapped(outputs: list[jax.Array], taps: tuple[int, ...]) -> jax.Array:
    """Outputs of the tapped layers side by side; no columns without taps."""
    for tap in taps:
        if not 0 <= tap < len(outputs):
            raise ValueError(f"taps: layer {tap} lies outside the target's {len(outputs)} layers")
    if not taps:
        return jnp.zeros((*outputs[0].shape[:-1], 0), outputs[0].dtype)
    return jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
