"""The DFlash drafter (arXiv 2602.06036): one pass proposes a distribution for each position.

A Qwen3 decoder without embedding or head of its own: it borrows the target's. The context enters
only as keys and values: features of the target, taken after a few of its layers, are fused by `fc`
and `hidden_norm` into one vector a position, and every layer projects that vector, with the same
kernels that it uses for the block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.draft_attention import draft_attn

from .. import rope
from ..layers import MLP, Linear, RMSNorm, float_dtype
from .config import DFlashConfig


class DraftAttention(nnx.Module):
    """Grouped-query attention of the block over the context and itself."""

    def __init__(self, config: DFlashConfig, *, param_dtype, rngs: nnx.Rngs | None):
        def linear(inputs, outputs):
            return Linear(
                inputs, outputs, param_dtype=param_dtype, rngs=rngs, std=config.initializer_range
            )

        size, dim = config.hidden_size, config.head_dim
        self.q_proj = linear(size, config.num_attention_heads * dim)
        self.k_proj = linear(size, config.num_key_value_heads * dim)
        self.v_proj = linear(size, config.num_key_value_heads * dim)
        self.o_proj = linear(config.num_attention_heads * dim, size)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, param_dtype=param_dtype)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, param_dtype=param_dtype)
        self.config = config

    def keys_values(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] to rotated keys and values, each [B, T, kv_heads, head_dim]."""
        keys = self.k_norm(self._heads(self.k_proj(x)))
        keys = rope.rotate_halves(keys, cos[:, :, None], sin[:, :, None])
        return keys, self._heads(self.v_proj(x))

    def __call__(self, x, cos, sin, context, visible) -> jax.Array:
        """Attention of the block.

        Args:
          x: [B, T, D] normed block.
          cos, sin: [B, T, head_dim / 2] of the block's positions.
          context: keys and values [B, kv_heads, C, head_dim] of the context.
          visible: bool[B, T, C + T], context columns first.

        Returns:
          [B, T, D].
        """
        batch, length, _ = x.shape
        query = self.q_norm(self._heads(self.q_proj(x)))
        query = rope.rotate_halves(query, cos[:, :, None], sin[:, :, None])
        mixed = draft_attn(query, *context, *self.keys_values(x, cos, sin), visible)
        return self.o_proj(mixed.reshape(batch, length, -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        heads = x.shape[-1] // self.config.head_dim
        return x.reshape(*x.shape[:2], heads, self.config.head_dim)


class DraftDecoderLayer(nnx.Module):
    """Pre-norm attention and pre-norm MLP, each with a residual."""

    def __init__(self, config: DFlashConfig, *, param_dtype, rngs: nnx.Rngs | None):
        self.input_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype
        )
        self.self_attn = DraftAttention(config, param_dtype=param_dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype
        )
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            param_dtype=param_dtype,
            rngs=rngs,
            std=config.initializer_range,
        )

    def __call__(self, x, cos, sin, context, visible) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, visible)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nnx.Module):
    """The drafter. B requests, T block slots, L = block_size - 1, D hidden_size, F = len(taps) * D.

    Args:
      config: sizes and constants.
      dtype: of the activations and the cache, float32 or bfloat16.
      param_dtype: of the parameters; `dtype` by default.
      rngs: source of random parameters; without it they are zero.
    """

    def __init__(
        self,
        config: DFlashConfig,
        *,
        dtype=jnp.bfloat16,
        param_dtype=None,
        rngs: nnx.Rngs | None = None,
    ):
        self.dtype = float_dtype("dtype", dtype)
        param_dtype = float_dtype("param_dtype", dtype if param_dtype is None else param_dtype)
        self.fc = Linear(
            len(config.taps) * config.hidden_size,
            config.hidden_size,
            param_dtype=param_dtype,
            rngs=rngs,
            std=config.initializer_range,
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.layers = nnx.List(
            DraftDecoderLayer(config, param_dtype=param_dtype, rngs=rngs)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.config = config

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based target layers whose outputs are the features, in order."""
        return self.config.taps

    def forward(
        self,
        block_embeddings: jax.Array,
        block_positions: jax.Array,
        features: jax.Array,
        feature_positions: jax.Array,
        mask: jax.Array,
    ) -> jax.Array:
        """One pass without a cache, differentiable; `mask` alone says what is seen.

        Args:
          block_embeddings: [B, T, D], the target's embedding of root and masks (times
            `input_embedding_scale`); T may hold several blocks side by side.
          block_positions: i32[B, T].
          features: [B, C, F] of the context.
          feature_positions: i32[B, C].
          mask: bool[B, T, C + T], what each slot sees, context columns first; at least one each.

        Returns:
          hidden [B, T, D] after the last norm.
        """
        context = self._fuse(features)
        far = rope.cos_sin(self.config.rope, self.config.head_dim, feature_positions, self.dtype)
        near = rope.cos_sin(self.config.rope, self.config.head_dim, block_positions, self.dtype)
        x = block_embeddings.astype(self.dtype)
        for layer in self.layers:
            kept = [part.swapaxes(1, 2) for part in layer.self_attn.keys_values(context, *far)]
            x = layer(x, *near, kept, mask)
        return self.norm(x)

    def init_cache(self, batch: int, rows: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Empty keys and values of the context: two [batch, kv_heads, rows, head_dim] a layer."""
        # Heads before rows: both attention products then read an array without a transpose.
        shape = (batch, self.config.num_key_value_heads, rows, self.config.head_dim)
        empty = jnp.zeros(shape, self.dtype)
        return tuple((empty, empty) for _ in self.layers)

    def extend(self, cache, features: jax.Array, lengths: jax.Array, counts: jax.Array):
        """Appends accepted positions to the context.

        Args:
          cache: from `init_cache`; updated in place under jit.
          features: [B, T, F] of the positions lengths .. lengths + T - 1.
          lengths: i32[B], rows in use.
          counts: i32[B], how many of the T positions to append; rows past the cache are dropped.

        Returns:
          The cache.
        """
        steps = jnp.arange(features.shape[1], dtype=jnp.int32)
        positions = lengths[:, None] + steps
        context = self._fuse(features)
        cos, sin = rope.cos_sin(self.config.rope, self.config.head_dim, positions, context.dtype)
        capacity = cache[0][0].shape[2]
        rows = jnp.where(steps < counts[:, None], positions, capacity)[:, None]
        # Every leading axis is indexed: XLA transposes an operand whose scattered axes do not lead.
        batch = jnp.arange(lengths.shape[0], dtype=jnp.int32)[:, None, None]
        heads = jnp.arange(self.config.num_key_value_heads, dtype=jnp.int32)[:, None]

        def append(old, new):
            return old.at[batch, heads, rows].set(new.swapaxes(1, 2), mode="drop")

        extended = []
        with jax.named_scope("extend"):
            for old, layer in zip(cache, self.layers, strict=True):
                # XLA for GPUs makes one product of products with one operand, and for it copies the layers' matrices
                # side by side in every round: a barrier gives each layer an operand of its own.
                context = jax.lax.optimization_barrier(context)
                new = layer.self_attn.keys_values(context, cos, sin)
                extended.append(tuple(map(append, old, new)))
        return tuple(extended)

    def draft(self, target, cache, root_tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Logits of the L positions after each root, in one pass.

        Args:
          target: whose embedding and head to use.
          cache: the context, `lengths` rows of it in use.
          root_tokens: i32[B], the newest token, at position lengths; it has no context row yet.
          lengths: i32[B].

        Returns:
          f32[B, L, V]; row i is the distribution of the token at position lengths + 1 + i.
        """
        config = self.config
        slots = jnp.arange(config.block_size, dtype=jnp.int32)
        tokens = jnp.where(slots == 0, root_tokens[:, None], config.mask_token_id)
        positions = lengths[:, None] + slots
        x = (target.embed(tokens) * config.input_embedding_scale).astype(self.dtype)
        cos, sin = rope.cos_sin(config.rope, config.head_dim, positions, x.dtype)
        columns = jnp.arange(cache[0][0].shape[2], dtype=jnp.int32)
        in_use = columns < lengths[:, None]
        columns = jnp.concatenate([jnp.broadcast_to(columns, in_use.shape), positions], axis=1)
        in_use = jnp.concatenate([in_use, jnp.ones_like(positions, bool)], axis=1)
        ahead = columns[:, None] - positions[..., None]
        for kind, layer, context in zip(config.layers, self.layers, cache, strict=True):
            x = layer(x, cos, sin, context, in_use[:, None] & kind.sees(ahead))
        with jax.named_scope("head"):
            return self.logits(target, self.norm(x)[:, 1:])

    def logits(self, target, hidden: jax.Array) -> jax.Array:
        """The target's head on hidden [..., D], f32[..., V], with the drafter's own scaling."""
        logits = target.head(hidden.astype(target.dtype)) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _fuse(self, features: jax.Array) -> jax.Array:
        """[B, C, F] features to the [B, C, D] that every layer projects."""
        with jax.named_scope("fuse"):
            return self.hidden_norm(self.fc(features.astype(self.dtype)))
