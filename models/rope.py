"""Rotary position embedding: plain and YaRN frequencies, paired by neighbours or by halves.

YaRN: Peng et al., arXiv 2309.00071, sections 3.2 to 3.4, in the form that DeepSeek-V3 and Qwen3
checkpoints use.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from .common.fields import shown

_MOST = 1e12  # of any number of a rope
_LONGEST = 2**30  # positions


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary constants of one checkpoint.

    Attributes:
      theta: base of the frequencies.
      factor: YaRN's context extension; None is plain rope and ignores all that follows.
      original_max_position_embeddings: context length before the extension.
      beta_fast, beta_slow: rotations over the original context above which a frequency is kept and
        below which it is divided by `factor`.
      mscale, mscale_all_dim: numerator and denominator of the amplitude; None when the config lacks
        it.
      attention_factor: amplitude that overrides the rule made of the two.
      truncate: whether the ramp between kept and divided frequencies begins and ends at whole pairs.
    """

    theta: float
    factor: float | None = None
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.theta <= 1:
            raise ValueError(f"the rope's theta must be above 1, not {self.theta}")
        for name in ("theta", "factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"the rope's {name} must be above 0, not {value}")
            # Beyond these no arithmetic on them overflows float32, and no model has such.
            if value is not None and not 1 / _MOST <= value <= _MOST:
                raise ValueError(
                    f"the rope's {name} must lie in {1 / _MOST:g} .. {_MOST:g}, not {value}"
                )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MOST:
                raise ValueError(f"the rope's {name} must lie in 0 .. {_MOST:g}, not {value}")
        original = self.original_max_position_embeddings
        if self.factor is not None and not 1 <= original <= _LONGEST:
            raise ValueError(
                "the rope's original_max_position_embeddings must be at least 1, "
                f"up to {_LONGEST}, not {shown(original)}"
            )

    @property
    def amplitude(self) -> float:
        """What multiplies cos and sin."""
        if self.factor is None:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """What multiplies an MLA target's softmax scale: mscale(factor, mscale_all_dim) squared."""
        if self.factor is None or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1; 1 without extension."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Radians a position for each of the dim / 2 pairs, f32[dim / 2]."""
    # float32 throughout, as where the checkpoints were trained: at position 262,143 one ulp shows.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    kept = np.float32(1) / np.float32(rope.theta) ** exponents
    if rope.factor is None:
        return kept

    def pair_of(rotations: float) -> float:
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / np.float32(span), 0, 1)
    return (kept / np.float32(rope.factor) * ramp + kept * (1 - ramp)).astype(np.float32)


def cos_sin(rope: RopeConfig, dim: int, positions: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin of `positions` i32[...], each [..., dim / 2] of `dtype`; angles are float32."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, dim)
    return (
        (jnp.cos(angles) * rope.amplitude).astype(dtype),
        (jnp.sin(angles) * rope.amplitude).astype(dtype),
    )


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates neighbours (0,1), (2,3), ... of the last axis; the result is half-split.

    Scores do not depend on the order of the result as long as queries and keys share it.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)


def rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + dim / 2) of the last axis, as Qwen3 does."""
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
