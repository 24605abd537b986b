"""Trains the demo's target: next-token loss, router balance, int4 experts faked towards the end."""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ddtree_jax.models import KimiK26, KimiK26Config, quantization, rope

_BIAS_STEP = 1e-3  # DeepSeek-V3's auxiliary-loss-free balancing, arXiv 2412.19437, section 2.1.2
# The corpus is small and visited ten times: a decay far above the usual 0.1 holds the overfitting back.
_WEIGHT_DECAY = 0.8
_FAKE_FROM = 0.6  # share of the time after which the experts are rounded to int4


def path_names(path) -> list[str]:
    """Names along a pytree path of an nnx state."""
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def is_routed_expert(path) -> bool:
    return "experts" in path_names(path)


def is_router_bias(path) -> bool:
    return "e_score_correction_bias" in path_names(path)


@jax.custom_vjp
def fake_quantize(weight: jax.Array) -> jax.Array:
    """f32 weights to the values that their packed int4 form stands for; the gradient passes straight."""
    values, scale = quantization.quantize(weight)
    groups = values.reshape(*scale.shape, quantization.GROUP).astype(scale.dtype)
    return (groups * scale[..., None]).reshape(weight.shape).astype(weight.dtype)


fake_quantize.defvjp(lambda weight: (fake_quantize(weight), None), lambda _, grad: (grad,))


def compute_params(params, rounded: jax.Array | bool):
    """What the model computes with: bfloat16, routed experts rounded to int4 when `rounded`."""

    def convert(path, value):
        if is_router_bias(path):
            return value
        if is_routed_expert(path):
            value = jnp.where(rounded, fake_quantize(value), value)
        return value.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(convert, params)


def token_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of f32[..., V] with i32[...], in nats."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def float_experts(target: KimiK26) -> KimiK26:
    """The same model with its packed experts as the floats that they stand for: they train and batch faster."""
    config = dataclasses.replace(target.config, experts="float")
    model = nnx.eval_shape(lambda: KimiK26(config, dtype=target.dtype))
    packed = {path: value[...] for path, value in nnx.to_flat_state(nnx.state(target))}
    for path, slot in nnx.to_flat_state(nnx.state(model)):
        if path in packed:
            slot.set_value(packed[path])
            continue
        words, scale = (packed[(*path[:-1], f"{path[-1]}_{part}")] for part in ("packed", "scale"))
        slot.set_value(quantization.dequantize(words, scale, target.dtype))
    return model


def forward_with_loads(model: KimiK26, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """`model.forward` with, for each MoE layer, the share of the choices that went to each expert."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = model.embed(tokens)
    cos, sin = rope.cos_sin(model.config.rope, model.config.qk_rope_head_dim, positions, x.dtype)
    loads = []
    for layer in model.layers:
        x = x + layer.self_attn.causal(layer.input_layernorm(x), cos, sin)
        if layer.is_moe:
            normed = layer.post_attention_layernorm(x)
            ids, _ = layer.mlp.gate(normed.reshape(-1, normed.shape[-1]))
            loads.append(jnp.mean(ids[..., None] == jnp.arange(layer.mlp.experts.count), (0, 1)))
        x = layer.feed_forward(x)
    return model.norm(x), loads


def balance(params, loads: list[jax.Array]):
    """Raises the bias of experts with less than their share of the load, lowers the others'."""
    remaining = iter(loads)

    def move(path, value):
        if not is_router_bias(path):
            return value
        load = next(remaining)
        return value + _BIAS_STEP * jnp.sign(jnp.mean(load) - load)

    return jax.tree_util.tree_map_with_path(move, params)


def optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate, which changes from call to call."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(
            weight_decay, mask=lambda params: jax.tree.map(lambda value: value.ndim > 1, params)
        ),
    )


def learning_rate(peak: float, step: int, elapsed: float, warmup: int = 200) -> float:
    """Linear warm-up by steps, then a cosine to 2% of the peak by the share of time that has passed."""
    cosine = 0.5 * (1 + np.cos(np.pi * min(elapsed, 1.0)))
    return float(peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * cosine))


@functools.partial(
    jax.jit, donate_argnums=(1, 2), static_argnames=("graphdef", "steps", "batch", "length")
)
def _train_steps(graphdef, params, moments, tokens, key, rate, rounded, *, steps, batch, length):
    def loss_of(params, window):
        model = nnx.merge(graphdef, compute_params(params, rounded))
        hidden, loads = forward_with_loads(model, window[:, :-1])
        return jnp.mean(token_losses(model.head(hidden), window[:, 1:])), loads

    def step(carry, key):
        params, moments = carry
        starts = jax.random.randint(key, (batch, 1), 0, tokens.shape[0] - length - 1)
        window = tokens[starts + jnp.arange(length + 1)].astype(jnp.int32)
        (loss, loads), grads = jax.value_and_grad(loss_of, has_aux=True)(params, window)
        updates, moments = optimizer(_WEIGHT_DECAY).update(grads, moments, params)
        params = jax.tree.map(lambda value, update: value - rate * update, params, updates)
        imbalance = jnp.max(jnp.stack(loads)) * loads[0].shape[0]
        return (balance(params, loads), moments), (loss, imbalance)

    (params, moments), (losses, imbalance) = jax.lax.scan(
        step, (params, moments), jax.random.split(key, steps)
    )
    return params, moments, jnp.mean(losses), jnp.mean(imbalance)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _window_losses(graphdef, params, rounded, window):
    model = nnx.merge(graphdef, compute_params(params, rounded))
    return token_losses(model.head(forward_with_loads(model, window[:, :-1])[0]), window[:, 1:])


def held_out_loss(graphdef, params, rounded: bool, tokens: np.ndarray, length: int) -> float:
    """Mean loss in nats a token over the stream cut into windows of `length`."""
    count = min((len(tokens) - 1) // length, 256)
    windows = np.stack([tokens[i * length : i * length + length + 1] for i in range(count)])
    windows = windows.astype(np.int32)
    size = min(32, count)
    batches = [windows[i : i + size] for i in range(0, count - size + 1, size)]
    return float(np.mean([np.mean(_window_losses(graphdef, params, rounded, b)) for b in batches]))


def train(
    config: KimiK26Config,
    tokens: np.ndarray,
    held_out: np.ndarray,
    *,
    minutes: float,
    seed: int,
    lengths: tuple[int, ...],
    tokens_per_step: int,
    steps_per_call: int,
    peak: float = 3e-3,
):
    """Trains from random numbers for `minutes`, compilation included.

    Args:
      config: the target's sizes.
      tokens, held_out: u16[n] streams.
      minutes: wall-clock time.
      seed: of the parameters and of the windows.
      lengths: sequence lengths, each used for an equal share of the time.
      tokens_per_step: batch times length.
      steps_per_call: steps in one device program.

    Returns:
      graphdef and f32 parameters of a `KimiK26` with float experts; round the experts with
      `compute_params(params, True)`.
    """
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
    model = KimiK26(config, **kinds, rngs=nnx.Rngs(seed), experts="float")
    graphdef, params = nnx.split(model)
    moments = optimizer(_WEIGHT_DECAY).init(params)
    key = jax.random.key(seed)
    data = jnp.asarray(tokens)
    start, step, elapsed = time.monotonic(), 0, 0.0
    reported = start
    while elapsed < 1.0:
        length = lengths[min(int(elapsed * len(lengths)), len(lengths) - 1)]
        rounded = elapsed >= _FAKE_FROM
        params, moments, loss, imbalance = _train_steps(
            graphdef,
            params,
            moments,
            data,
            jax.random.fold_in(key, step),
            learning_rate(peak, step, elapsed),
            rounded,
            steps=steps_per_call,
            batch=max(1, tokens_per_step // length),
            length=length,
        )
        loss = float(loss)  # waits, so that the clock is honest
        step += steps_per_call
        now = time.monotonic()
        elapsed = (now - start) / (60 * minutes)
        if now - reported > 15 or step == steps_per_call or elapsed >= 1.0:
            reported = now
            outside = held_out_loss(graphdef, params, rounded, held_out, length)
            print(
                f"target step {step} {now - start:.0f} s length {length} loss {loss:.3f} "
                f"held-out {outside:.3f} largest load {float(imbalance):.2f}x",
                flush=True,
            )
    return graphdef, params
