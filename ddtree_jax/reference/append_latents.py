"""Writing a round's rows behind each request's prefix."""

import numpy as np


def append_latents(cache, latents, lengths, *, layer):
    """A copy of `cache` [layers, B, S, width] with cache[layer, b, lengths[b] + i] = latents[b, i].

    `latents` is [B, N, width], `lengths` i32[B] and `layer` an int; what falls outside is dropped.
    """
    cache = np.array(cache)
    layers, _, rows, _ = cache.shape
    for b, i in np.ndindex(latents.shape[:2]):
        row = int(lengths[b]) + i
        if 0 <= layer < layers and 0 <= row < rows:
            cache[layer, b, row] = latents[b, i]
    return cache
