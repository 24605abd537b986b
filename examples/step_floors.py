"""How fast the stages of a step could be: each must read its weights once and do its arithmetic."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes a second that the device reads, and bfloat16 FLOP a second of its matrix units."""

    bandwidth: float
    matrix: float

    def microseconds(self, moved: float, work: float = 0.0) -> float:
        return max(moved / self.bandwidth, work / self.matrix) * 1e6


def weight_bytes(module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(module))


def product(module, rows: int, rates: Rates) -> float:
    """Microseconds of bfloat16 weights that every row is multiplied with."""
    return rates.microseconds(weight_bytes(module), rows * weight_bytes(module))


def experts(module, ids, rates: Rates) -> float:
    """Microseconds of the routed experts that ids [T, k] touch: each is read once."""
    ids = np.asarray(ids)
    each = weight_bytes(module) / module.count
    # Packed weights take 4.5 bits each with their scales: 2 FLOP for each of them and row.
    return rates.microseconds(len(np.unique(ids)) * each, ids.size * 2 * each * 8 / 4.5)


def attention(batch: int, prefix: int, nodes: int, heads: int, rates: Rates) -> float:
    """Microseconds of one layer's verify_attn."""
    rows = prefix + nodes
    return rates.microseconds(batch * rows * 1152, 2 * batch * nodes * heads * rows * (576 + 512))
