"""Continues token windows with the frozen target: a batched decode with a latent cache, in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models import KimiK26, rope


def _attend(attention, x, cos, sin, cache, position):
    """Absorbed attention of one token a request over a cache [B, S, 576] that holds its own row too."""
    plain, rotary = attention.queries(x, cos, sin)
    query = jnp.concatenate(
        [jnp.einsum("bthd,hdr->bthr", plain, attention.kv_b_proj.k_up[...]), rotary], axis=-1
    )[:, 0]
    scores = jnp.einsum("bhr,bsr->bhs", query, cache, preferred_element_type=jnp.float32)
    seen = jnp.arange(cache.shape[1]) <= position
    scores = jnp.where(seen, scores * attention.config.softmax_scale, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    latent = jnp.einsum("bhs,bsr->bhr", weights, cache[..., : attention.config.kv_lora_rank])
    mixed = jnp.einsum("bhr,hrv->bhv", latent, attention.kv_b_proj.v_up[...])
    return attention.o_proj(mixed.reshape(x.shape[0], 1, -1))


@functools.partial(jax.jit, static_argnames=("graphdef", "length"))
def _continue(graphdef, params, prompts, key, temperature, *, length):
    model: KimiK26 = nnx.merge(graphdef, params)
    config = model.config
    batch, prompt_length = prompts.shape

    def angles(positions):
        return rope.cos_sin(config.rope, config.qk_rope_head_dim, positions, model.dtype)

    def choose(hidden, key):
        logits = model.head(hidden)
        noise = jax.random.gumbel(key, logits.shape) * temperature[:, None]
        return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)

    x = model.embed(prompts)
    cos, sin = angles(jnp.broadcast_to(jnp.arange(prompt_length), prompts.shape))
    caches = []
    for layer in model.layers:
        normed = layer.input_layernorm(x)
        rows = layer.self_attn.latents(normed, cos, sin)
        caches.append(jnp.pad(rows, ((0, 0), (0, length - prompt_length), (0, 0))))
        x = layer.feed_forward(x + layer.self_attn.causal(normed, cos, sin))
    keys = jax.random.split(key, length - prompt_length)
    first = choose(model.norm(x[:, -1]), keys[0])

    def step(carry, inputs):
        token, caches = carry
        position, key = inputs
        x = model.embed(token)[:, None]
        cos, sin = angles(jnp.full((batch, 1), position))
        grown = []
        for layer, cache in zip(model.layers, caches, strict=True):
            normed = layer.input_layernorm(x)
            row = layer.self_attn.latents(normed, cos, sin)
            cache = jax.lax.dynamic_update_slice(cache, row, (0, position, 0))
            grown.append(cache)
            x = layer.feed_forward(x + _attend(layer.self_attn, normed, cos, sin, cache, position))
        following = choose(model.norm(x[:, 0]), key)
        return (following, tuple(grown)), following

    positions = jnp.arange(prompt_length, length - 1)
    _, rest = jax.lax.scan(step, (first, tuple(caches)), (positions, keys[1:]))
    return jnp.concatenate([prompts, first[:, None], rest.T], axis=1)


def continue_windows(
    graphdef, params, prompts: np.ndarray, *, length: int, temperature: np.ndarray, seed: int
) -> np.ndarray:
    """Prompts u16[B, P] with the target's continuation, u16[B, length].

    Args:
      graphdef, params: a `KimiK26` with float experts, parameters as it decodes with them.
      prompts: all of one length.
      length: tokens in all.
      temperature: f32[B]; 0 takes the most probable token.
      seed: of the draws.
    """
    out = _continue(
        graphdef,
        params,
        jnp.asarray(prompts, jnp.int32),
        jax.random.key(seed),
        jnp.asarray(temperature, jnp.float32),
        length=length,
    )
    return np.asarray(out).astype(np.uint16)
