"""Oracle of `ddtree_jax.expert_mlp`."""

import numpy as np


def unpack_int4(words, scales):
    """Weights f64[..., inputs] of words i32[..., inputs / 8] and scales [..., inputs / 32]."""
    words = np.asarray(words).astype(np.int64) & 0xFFFFFFFF
    nibbles = np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=-1)
    values = nibbles.reshape(*words.shape[:-1], -1) - 8
    return values * np.repeat(np.asarray(scales, np.float64), 32, axis=-1)


def expert_mlp(x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale):
    """f64[T, D]: each token's chosen experts, one after the other."""
    x = np.asarray(x, np.float64)
    gate_up, down = unpack_int4(gate_up, gate_up_scale), unpack_int4(down, down_scale)
    out = np.zeros_like(x)
    for t, (ids, weights) in enumerate(zip(expert_ids, expert_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < len(down):
                gate, up = np.split(gate_up[expert] @ x[t], 2)
                out[t] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out
