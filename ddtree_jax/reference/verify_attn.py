"""The attention of a tree's nodes over a latent cache (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

import numpy as np

LATENT_DIM = 512


def verify_attn(query, cache, lengths, ancestors, num_nodes, *, scale, layer, cache_scale=None):
    """Softmax attention in float64 over exactly the rows that each node may see.

    Args:
      query: [B, N, H, 576] of any float type.
      cache: [layers, B, S, 576], the tree's rows at `lengths`.
      lengths: i32[B], clamped to 0 .. S - N.
      ancestors: u32[B, N, W]; bits from num_nodes on mean nothing.
      num_nodes: i32[B]. A row past it sees only itself.
      scale: multiplies the scores.
      layer: an int, clamped to 0 .. layers - 1.
      cache_scale: f32[layers] that multiplies the cache's numbers; None means 1.

    Returns:
      f64[B, N, H, 512].
    """
    query = np.asarray(query).astype(np.float64)
    layer = min(max(int(layer), 0), len(cache) - 1)
    rows = np.asarray(cache)[layer].astype(np.float64)
    if cache_scale is not None:
        rows = rows * np.float64(cache_scale[layer])
    batch, nodes, heads, _ = query.shape
    out = np.zeros((batch, nodes, heads, LATENT_DIM))
    for b in range(batch):
        length = min(max(int(lengths[b]), 0), rows.shape[1] - nodes)
        for i in range(nodes):
            if i < num_nodes[b]:
                seen = [
                    j
                    for j in range(int(num_nodes[b]))
                    if ancestors[b, i, j // 32] >> np.uint32(j % 32) & 1
                ]
                visible = np.concatenate([rows[b, :length], rows[b, [length + j for j in seen]]])
            else:
                visible = rows[b, length + i][None]
            scores = scale * query[b, i] @ visible.T
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[b, i] = weights @ visible[:, :LATENT_DIM]
    return out
