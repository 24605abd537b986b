"""The DFlash drafter in NumPy, float64, without a cache: arXiv 2602.06036 and Qwen3's layers, written to be read.

Weights are named and oriented as in the checkpoint, settings as in its config.json.
"""

import math

import numpy as np


def draft(settings, weights, embedding, head, features, root):
    """Logits [block_size - 1, V] of the positions after `root`.

    Args:
      settings: config.json; what dflash_config says wins.
      weights: the checkpoint's tensors.
      embedding, head: the target's, [V, D] and [D, V].
      features: [C, taps * D] of the context's positions 0 .. C - 1.
      root: the newest token, at position C.
    """
    settings = {**settings, **settings["dflash_config"]}
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    block, eps = settings["block_size"], settings["rms_norm_eps"]
    context = _rms(features.astype(np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    tokens = [root] + [settings["mask_token_id"]] * (block - 1)
    x = embedding[tokens].astype(np.float64) * settings.get("input_embedding_scale", 1.0)
    positions = np.arange(len(features) + block)
    here = positions[len(features) :]
    heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    size = settings["head_dim"]
    for i in range(settings["num_hidden_layers"]):
        layer = f"layers.{i}."
        attention = layer + "self_attn."

        def project(rows, name, count, attention=attention):
            return (rows @ w[f"{attention}{name}_proj.weight"].T).reshape(len(rows), count, size)

        normed = _rms(x, w[layer + "input_layernorm.weight"], eps)
        # The same kernels for context and block; the context has no input norm.
        both = np.concatenate([context, normed])
        query = _rms(project(normed, "q", heads), w[attention + "q_norm.weight"], eps)
        key = _rms(project(both, "k", groups), w[attention + "k_norm.weight"], eps)
        query = _rotate(query, here, settings)
        key = _rotate(key, positions, settings)
        value = project(both, "v", groups)
        seen = _seen(settings, i, here[:, None] - positions)
        mixed = np.empty((block, heads, size))
        for head_index in range(heads):
            group = head_index // (heads // groups)
            scores = query[:, head_index] @ key[:, group].T / math.sqrt(size)
            scores = np.where(seen, scores, -np.inf)
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head_index] = share / share.sum(axis=1, keepdims=True) @ value[:, group]
        x = x + mixed.reshape(block, -1) @ w[attention + "o_proj.weight"].T
        normed = _rms(x, w[layer + "post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"{layer}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "mlp.down_proj.weight"].T
    logits = _rms(x, w["norm.weight"], eps)[1:] @ head.astype(np.float64)
    logits *= settings.get("output_multiplier", 1.0)
    cap = settings.get("final_logit_softcapping")
    return logits if cap is None else np.tanh(logits / cap) * cap


def _rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _seen(settings, layer, behind):
    """Whether a slot sees a column `behind` positions before it (negative: after it)."""
    causal = settings.get("is_causal")
    window = None
    if settings.get("use_swa"):
        window = settings["swa_window_size"]
    elif settings.get("layer_types", ["full_attention"] * 99)[layer] == "sliding_attention":
        window = settings["sliding_window"]
        causal = True if causal is None else causal
    seen = behind >= 0 if causal else np.full(behind.shape, True)
    return seen if window is None else seen & (np.abs(behind) < window)


def _rotate(x, positions, settings):
    """Qwen3's rope, halves against each other, over the whole head: x [T, heads, size]."""
    size = x.shape[-1]
    theta, yarn = settings["rope_theta"], settings.get("rope_scaling")
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    amplitude = 1.0
    if yarn:
        original = yarn["original_max_position_embeddings"]

        def dimension(rotations):
            return size * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low = max(math.floor(dimension(yarn["beta_fast"])), 0)
        high = min(math.ceil(dimension(yarn["beta_slow"])), size - 1)
        ramp = (np.arange(size // 2) - low) / (high - low if high != low else 0.001)
        ramp = np.clip(ramp, 0, 1)
        frequencies = frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)
        amplitude = _amplitude(settings, yarn)
    angles = positions[:, None] * frequencies
    cos, sin = (amplitude * f(angles)[:, None] for f in (np.cos, np.sin))
    low, high = x[..., : size // 2], x[..., size // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _amplitude(settings, yarn):
    for told in (settings.get("rope_attention_factor"), yarn.get("attention_factor")):
        if told is not None:
            return told

    def scale(by):
        return 0.1 * by * math.log(yarn["factor"]) + 1 if yarn["factor"] > 1 else 1.0

    if yarn.get("mscale") and yarn.get("mscale_all_dim"):
        return scale(yarn["mscale"]) / scale(yarn["mscale_all_dim"])
    return scale(1.0)
