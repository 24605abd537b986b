"""A model over a mesh: which devices hold what, and the kernels that each of them runs on its own part.

XLA's partitioner splits plain JAX by how the parameters lie. It cannot look into a custom call, before which it
would gather all that the call reads on every device: a kernel whose operands are split runs under `shard_map`.
Kernels whose operands are whole everywhere need nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax.attention import verify_attn

from .sharding import ShardingRules


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and what lies where on it. Hashable: modules hold it as static data.

    Attributes:
      mesh: of `Auto` axes.
      rules: which of its axes splits what.
    """

    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every device holds all of: caches, activations, the drafter."""
        return NamedSharding(self.mesh, PartitionSpec())

    def on_each(self, body: Callable, in_specs, out_specs) -> Callable:
        """`body` as each device runs it on its own part of the operands."""
        # Compiled even where the caller is not: outside of jit, shard_map goes operation by operation.
        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs))

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Rows of `table` [V, D], split by V, at `tokens` i32[...] in 0 .. V - 1: [..., D], one sum over devices.

        By hand: XLA for GPUs makes a slice of a lookup of one row, and its partitioner gathers the table for it.
        """
        axis = self.rules.vocab

        def own(table, tokens):
            rows = tokens - jax.lax.axis_index(axis) * table.shape[0]
            held = (rows >= 0) & (rows < table.shape[0])
            found = jnp.take(table, rows, axis=0, mode="clip")
            return jax.lax.psum(jnp.where(held[..., None], found, 0), axis)

        whole = PartitionSpec()
        return self.on_each(own, (PartitionSpec(axis), whole), whole)(table, tokens)

    def verify_attn(
        self, query, cache, lengths, tree, *, scale: float, layer, cache_scale=None
    ) -> jax.Array:
        """`ddtree_jax.verify_attn`, each device with its own heads; cache, lengths and tree are whole."""

        def own(query, cache, lengths, tree, cache_scale):
            return verify_attn(
                query, cache, lengths, tree, scale=scale, layer=layer, cache_scale=cache_scale
            )

        whole, by_heads = PartitionSpec(), PartitionSpec(None, None, self.rules.heads)
        attend = self.on_each(own, (by_heads, whole, whole, whole, whole), by_heads)
        return attend(query, cache, lengths, tree, cache_scale)
