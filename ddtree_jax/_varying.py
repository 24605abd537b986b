"""Values that vary over the axes of a mesh, inside `jax.shard_map`: a loop's first carry is of the type of its last."""

from __future__ import annotations

import jax


def vary_as(values, *like):
    """The pytree `values`, varying over every mesh axis that a leaf of `like` varies over; elsewhere as it is.

    A loop that starts from constants ends with what its operands made of them. `shard_map` tells one value for all
    devices from one for each, and refuses a loop whose carry changes from the one to the other.
    """
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(like)))

    def cast(value):
        missing = tuple(sorted(axes - _axes(value)))
        return jax.lax.pcast(value, missing, to="varying") if missing else value

    return jax.tree.map(cast, values) if axes else values


def _axes(value) -> frozenset[str]:
    """The mesh axes that an array varies over; none outside of `shard_map`."""
    return jax.typeof(value).mat.varying
