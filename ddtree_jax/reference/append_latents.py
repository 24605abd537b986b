"""Writing a round's rows behind each request's prefix."""

import ml_dtypes
import numpy as np

LARGEST = 448  # of e4m3


def append_latents(cache, latents, lengths, *, layer, cache_scale=None):
    """A copy of `cache` [layers, B, S, width] with cache[layer, b, lengths[b] + i] = latents[b, i].

    `latents` is [B, N, width], `lengths` i32[B] and `layer` an int; what falls outside is dropped. A
    float8_e4m3fn cache gets `quantise`d latents by the layer's number of `cache_scale` f32[layers], 1 if None. What
    a scale of 0 or NaN makes of them is the arithmetic's; a subnormal one may count as 0 elsewhere.
    """
    cache = np.array(cache)
    layers, _, rows, _ = cache.shape
    if cache.dtype == ml_dtypes.float8_e4m3fn and 0 <= layer < layers:
        latents = quantise(latents, 1 if cache_scale is None else cache_scale[layer])
    for b, i in np.ndindex(latents.shape[:2]):
        row = int(lengths[b]) + i
        if 0 <= layer < layers and 0 <= row < rows:
            cache[layer, b, row] = latents[b, i]
    return cache


def quantise(values, scale):
    """float8_e4m3fn of values / scale in float32: the nearest, of two the even one, saturated; NaN if not finite."""
    values = np.asarray(values).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotients = np.clip(values / np.float32(scale), -LARGEST, LARGEST)
    sound = np.isfinite(values) & ~np.isnan(quotients)
    quotients = np.where(sound, quotients, np.float32(np.nan))  # one NaN of the two, 0x7f
    return quotients.astype(ml_dtypes.float8_e4m3fn)
