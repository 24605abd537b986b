"""How far a target's choice of experts is from a tie: the choice is a step, which no tolerance covers."""

import jax.numpy as jnp
import numpy as np
import quick_compile
from tiny_models import positions_of

from ddtree_jax.models import rope

#: No rounding in float32 bridges this distance: scores of two correct passes were at most 8e-7 apart in
#: 137,216 comparisons.
CLEAR = 1e-5


def clear_tokens(rng, target, shape):
    """Random tokens i32[B, T] whose routing rounding cannot change; most draws are."""
    while True:
        tokens = rng.integers(0, target.vocab_size, shape).astype(np.int32)
        if routing_margin(target, tokens) > CLEAR:
            return tokens


def routing_margin(target, tokens) -> float:
    """The smallest distance between an expert (or group) chosen and one not, over tokens i32[B, T]."""
    choices = _choices(target, jnp.asarray(tokens, jnp.int32))
    return min((margin(np.asarray(c), target.config).min() for c in choices), default=np.inf)


def margin(choice, config):
    """The distance for each row of biased scores f[T, E], by sorting: inf where all are chosen."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, config.n_group, -1)
    best = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
    kept = best >= np.sort(best, axis=-1)[:, -config.topk_group, None]
    allowed = np.where(kept[..., None], grouped, -np.inf).reshape(tokens, experts)
    return np.minimum(_gap(best, config.topk_group), _gap(allowed, config.num_experts_per_tok))


def _gap(values, chosen):
    ordered = np.sort(values, axis=-1)[:, ::-1]
    if chosen == ordered.shape[1]:
        return np.full(len(values), np.inf)
    return ordered[:, chosen - 1] - ordered[:, chosen]


@quick_compile.jit
def _choices(target, tokens):
    """Biased scores f32[B * T, E] of every routing layer of a plain pass."""
    x = target.embed(tokens)
    cos, sin = rope.cos_sin(target.config.rope, 64, positions_of(tokens), x.dtype)
    choices = []
    for layer in target.layers:
        x = x + layer.self_attn.causal(layer.input_layernorm(x), cos, sin)
        if layer.is_moe:
            rows = layer.post_attention_layernorm(x).reshape(-1, x.shape[-1])
            gate = layer.mlp.gate
            choices.append(gate.scores(rows) + gate.e_score_correction_bias[...])
        x = layer.feed_forward(x)
    return choices
