"""The accepted path: how far the target agrees with a draft tree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import _checks
from ddtree_jax._primitive import kernel_primitive
from ddtree_jax.tree import MAX_BUDGET, DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcceptedPath:
    """What a round emits. B requests, L the tree's `max_depth`.

    Attributes:
      nodes: i32[B, L + 1], the nodes whose rows are kept, root first, increasing; -1 past `num_emitted`.
      tokens: i32[B, L + 1], emitted: the target's token after each of these nodes; the last one is the
        bonus, the next tree's root. -1 past `num_emitted`.
      num_emitted: i32[B].
      finished: bool[B], a stop token, `max_new` or a missing target token ended the walk.
    """

    nodes: jax.Array
    tokens: jax.Array
    num_emitted: jax.Array
    finished: jax.Array


def tree_accept(tree: DraftTree, target_tokens, *, stop_tokens=None, max_new=None) -> AcceptedPath:
    """Walks each tree from the root along the target's tokens (DDTree, section 3.3).

    Args:
      tree: the verified tree.
      target_tokens: i32[B, N], the target's token after each node; a negative one means that it has none
        there, and the walk ends before it.
      stop_tokens: ids after which nothing more is emitted, a tuple or i32[M].
      max_new: i32[B], tokens to emit at most; None means no limit.

    Returns:
      An `AcceptedPath`; a tree without nodes emits nothing.

    Raises:
      ValueError: another dtype or shape.
      TypeError: `tree` is no `DraftTree`.
    """
    _checks.instance("tree", tree, DraftTree)
    target_tokens = _checks.array("target_tokens", target_tokens, ("B", "N"), jnp.int32)
    shape = target_tokens.shape
    _checks.between("target_tokens' nodes N", shape[1], 1, MAX_BUDGET + 1)
    if stop_tokens is None or isinstance(stop_tokens, tuple | list):
        limits = np.iinfo(np.int32)
        stop_tokens = np.asarray(
            [_checks.between("a stop token", t, limits.min, limits.max) for t in stop_tokens or ()],
            np.int32,
        )
    stop_tokens = _checks.array("stop_tokens", stop_tokens, ("M",), jnp.int32)
    if max_new is None:
        max_new = jnp.full(shape[:1], np.iinfo(np.int32).max, jnp.int32)
    max_new = _checks.array("max_new", max_new, shape[:1], jnp.int32)
    fields = [
        _checks.array(f"tree.{name}", getattr(tree, name), shape, jnp.int32)
        for name in ("tokens", "next_token", "next_sibling")
    ]
    num_nodes = _checks.array("tree.num_nodes", tree.num_nodes, shape[:1], jnp.int32)
    outputs = _tree_accept.bind(
        *fields, num_nodes, target_tokens, stop_tokens, max_new, depth=tree.max_depth
    )
    return AcceptedPath(*outputs)


def _accept_shapes(tokens, *_, depth):
    path, batch = (tokens.shape[0], depth + 1), tokens.shape[:1]
    shapes = [(path, jnp.int32), (path, jnp.int32), (batch, jnp.int32), (batch, jnp.bool_)]
    return [jax.ShapeDtypeStruct(*one) for one in shapes]


_tree_accept = kernel_primitive(
    "tree_accept",
    _accept_shapes,
    batch_axes=(0, 0, 0, 0, 0, None, 0),
    result_batch_axes=(0, 0, 0, 0),
    attributes=(),
)
