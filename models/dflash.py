"""The DFlash drafter (arXiv 2602.06036): one pass proposes a distribution for every position of a block.

A Qwen3 decoder without embedding or head of its own: it borrows the target's. The context enters only as keys and
values: features of the target, taken after a few of its layers, are fused by `fc` and `hidden_norm` into one vector a
position, and every layer projects that vector, with the same kernels that it uses for the block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from . import rope
from .config import DFlashConfig
from .layers import MLP, Linear, RMSNorm


class DraftAttention(nnx.Module):
    """Grouped-query attention of the block over the context and itself."""

    def __init__(self, config: DFlashConfig, *, dtype, rngs: nnx.Rngs | None):
        def linear(inputs, outputs):
            return Linear(inputs, outputs, dtype=dtype, rngs=rngs, std=config.initializer_range)

        size, dim = config.hidden_size, config.head_dim
        self.q_proj = linear(size, config.num_attention_heads * dim)
        self.k_proj = linear(size, config.num_key_value_heads * dim)
        self.v_proj = linear(size, config.num_key_value_heads * dim)
        self.o_proj = linear(config.num_attention_heads * dim, size)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype=dtype)
        self.config = config

    def keys_values(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] to rotated keys and values, each [B, kv_heads, T, head_dim]."""
        keys = self.k_norm(self._heads(self.k_proj(x)))
        return (
            rope.rotate_halves(keys, cos[:, :, None], sin[:, :, None]).swapaxes(1, 2),
            self._heads(self.v_proj(x)).swapaxes(1, 2),
        )

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
        config = self.config
        group = config.num_attention_heads // config.num_key_value_heads
        query = self.q_norm(self._heads(self.q_proj(x)))
        query = rope.rotate_halves(query, cos[:, :, None], sin[:, :, None])
        query = query.reshape(batch, length, config.num_key_value_heads, group, config.head_dim)
        parts = (context, self.keys_values(x, cos, sin))
        # Scores, not keys, are joined: the context's arrays are read where they lie.
        scores = jnp.concatenate(
            [
                jnp.einsum("btkgd,bksd->bkgts", query, keys, preferred_element_type=jnp.float32)
                for keys, _ in parts
            ],
            axis=-1,
        )
        scores = jnp.where(visible[:, None, None], scores * config.head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        split = jnp.split(weights, [context[0].shape[2]], axis=-1)
        mixed = sum(
            jnp.einsum("bkgts,bksd->btkgd", weight, values)
            for weight, (_, values) in zip(split, parts, strict=True)
        )
        return self.o_proj(mixed.reshape(batch, length, -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)


class DraftDecoderLayer(nnx.Module):
    """Pre-norm attention and pre-norm MLP, each with a residual."""

    def __init__(self, config: DFlashConfig, *, dtype, rngs: nnx.Rngs | None):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = DraftAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype
        )
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            dtype=dtype,
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
      dtype: dtype of the parameters and, by them, of the activations.
      rngs: source of random parameters; without it they are zero.
    """

    def __init__(self, config: DFlashConfig, *, dtype=jnp.bfloat16, rngs: nnx.Rngs | None = None):
        self.fc = Linear(
            len(config.taps) * config.hidden_size,
            config.hidden_size,
            dtype=dtype,
            rngs=rngs,
            std=config.initializer_range,
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            DraftDecoderLayer(config, dtype=dtype, rngs=rngs)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.config = config

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based target layers whose outputs are the features, in order."""
        return self.config.taps

    @property
    def dtype(self):
        """Dtype of the parameters."""
        return self.fc.kernel[...].dtype

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
        dtype = context.dtype
        far = rope.cos_sin(self.config.rope, self.config.head_dim, feature_positions, dtype)
        near = rope.cos_sin(self.config.rope, self.config.head_dim, block_positions, dtype)
        x = block_embeddings.astype(dtype)
        for layer in self.layers:
            x = layer(x, *near, layer.self_attn.keys_values(context, *far), mask)
        return self.norm(x)

    def logits(self, target, hidden: jax.Array) -> jax.Array:
        """The target's head on hidden [..., D], f32[..., V], with the drafter's own scaling."""
        logits = target.head(hidden.astype(target.dtype)) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _fuse(self, features: jax.Array) -> jax.Array:
        """[B, C, F] features to the [B, C, D] that every layer projects."""
        with jax.named_scope("fuse"):
            return self.hidden_norm(self.fc(features.astype(self.dtype)))
