"""Draft trees: the candidates of each position, and the best-first tree of their continuations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ddtree_jax import _checks
from ddtree_jax._ffi import workspace_bytes
from ddtree_jax._primitive import kernel_primitive

MAX_BUDGET = 256  # draft nodes a tree, root excluded
MAX_CANDIDATES = 256  # candidates a position
MAX_DEPTH = 31  # draft positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """A batch of draft trees of fixed capacity. B requests, N nodes (the root is node 0), W = ceil(N / 32).

    Nodes stand in the order in which the best-first search takes them, so a parent comes before its
    children and siblings descend in probability. Rows past `num_nodes` are unlinked and see only
    themselves. -1 means none.

    Attributes:
      tokens: i32[B, N].
      parents: i32[B, N].
      depths: i32[B, N], 0 at the root; a node's position is the root's plus its depth.
      next_token: i32[B, N], first child.
      next_sibling: i32[B, N].
      ancestors: u32[B, N, W], bit j % 32 of word j / 32 of row i: node j is i or an ancestor of i.
      log_probs: f32[B, N], the drafter's log-probability of the path from the root.
      num_nodes: i32[B].
      max_depth: static, L: no node is deeper.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    next_token: jax.Array
    next_sibling: jax.Array
    ancestors: jax.Array
    log_probs: jax.Array
    num_nodes: jax.Array
    max_depth: int = dataclasses.field(metadata={"static": True})


def draft_topk(logits, k: int) -> tuple[jax.Array, jax.Array]:
    """The k most probable tokens of each draft position.

    Args:
      logits: float32 or bfloat16 [B, L, V]. NaN counts as -inf.
      k: how many, 1 .. min(V, 256).

    Returns:
      log_probs f32[B, L, K], normalised over all of V in float32 and at most 0, and token_ids
      i32[B, L, K]; logit descending, then id ascending. A row without a finite normaliser is -inf.

    Raises:
      ValueError: another dtype, rank or k.
    """
    logits = _checks.array("logits", logits, ("B", "L", "V"), (jnp.float32, jnp.bfloat16))
    batch, depth, vocab = logits.shape
    if vocab < 1:
        raise ValueError("logits must have at least one token in the vocabulary V")
    k = _checks.between("k", k, 1, min(vocab, MAX_CANDIDATES))
    log_probs, token_ids = _draft_topk.bind(logits.reshape(batch * depth, vocab), k=k)
    return log_probs.reshape(batch, depth, k), token_ids.reshape(batch, depth, k)


def tree_build(
    log_probs, token_ids, root_tokens, *, budget: int, budgets=None, keep_spine: bool = False
) -> DraftTree:
    """The `budget` most probable continuations as one tree (DDTree, arXiv 2604.12989, algorithm 1).

    Equal to the paper's heap node for node: keys are float64 sums of the float32 log-probs from the root
    down, and ties go to the lexicographically smaller path of ranks, a prefix first.

    Args:
      log_probs: f32[B, L, K], each position's candidates, non-increasing, as `draft_topk` gives them.
      token_ids: i32[B, L, K].
      root_tokens: i32[B], the last known token of each request.
      budget: draft nodes, 0 .. 256; N = budget + 1.
      budgets: i32[B], caps a request below `budget`; None means no request is.
      keep_spine: keep the path of every position's best candidate in the trees whose budget is at
        least L. The other places go to the most probable other nodes.

    Returns:
      A `DraftTree`.

    Raises:
      ValueError: another dtype, shape or budget.
    """
    log_probs = _checks.array("log_probs", log_probs, ("B", "L", "K"), jnp.float32)
    batch, depth, k = log_probs.shape
    token_ids = _checks.array("token_ids", token_ids, (batch, depth, k), jnp.int32)
    root_tokens = _checks.array("root_tokens", root_tokens, (batch,), jnp.int32)
    budget = _checks.between("budget", budget, 0, MAX_BUDGET)
    _checks.between("log_probs' positions L", depth, 1, MAX_DEPTH)
    _checks.between("log_probs' candidates K", k, 1, MAX_CANDIDATES)
    if budgets is None:
        budgets = jnp.full_like(root_tokens, budget)
    budgets = _checks.array("budgets", budgets, (batch,), jnp.int32)
    keep_spine = _checks.flag("keep_spine", keep_spine)
    fields = _tree_build.bind(
        log_probs, token_ids, root_tokens, budgets, budget=budget, keep_spine=keep_spine
    )
    return DraftTree(*fields, max_depth=depth)


def chain_tree(tokens, num_nodes) -> DraftTree:
    """A tree without branches: node i follows node i - 1. A prefill chunk is one.

    Args:
      tokens: i32[B, N], 1 <= N <= 257.
      num_nodes: i32[B], how many of them are there.

    Returns:
      A `DraftTree` whose `log_probs` are 0 and whose `max_depth` is N - 1.

    Raises:
      ValueError: another dtype or shape.
    """
    tokens = _checks.array("tokens", tokens, ("B", "N"), jnp.int32)
    batch, nodes = tokens.shape
    _checks.between("tokens' nodes N", nodes, 1, MAX_BUDGET + 1)
    num_nodes = _checks.array("num_nodes", num_nodes, (batch,), jnp.int32)
    steps = jnp.arange(nodes, dtype=jnp.int32)
    there = steps < num_nodes[:, None]
    # Bits 0 .. i of row i, word by word; bit i alone past num_nodes.
    bit = jnp.arange(32 * -(-nodes // 32), dtype=jnp.int32)
    seen = jnp.where(there[..., None], bit <= steps[:, None], bit == steps[:, None])
    words = seen.reshape(batch, nodes, -1, 32).astype(jnp.uint32)
    ancestors = jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return DraftTree(
        tokens=jnp.where(there, tokens, 0),
        parents=jnp.where(there, steps - 1, -1),
        depths=jnp.where(there, steps, 0),
        next_token=jnp.where(steps + 1 < num_nodes[:, None], steps + 1, -1),
        next_sibling=jnp.full((batch, nodes), -1, jnp.int32),
        ancestors=ancestors,
        log_probs=jnp.where(there, 0.0, -jnp.inf).astype(jnp.float32),
        num_nodes=num_nodes,
        max_depth=nodes - 1,
    )


_draft_topk = kernel_primitive(
    "draft_topk",
    lambda logits, *, k: [
        jax.ShapeDtypeStruct((logits.shape[0], k), jnp.float32),
        jax.ShapeDtypeStruct((logits.shape[0], k), jnp.int32),
    ],
    batch_axes=(0,),
    result_batch_axes=(0, 0),
    attributes=(),
    workspace={
        "cuda": lambda logits, *, k: workspace_bytes("draft_topk_workspace", *logits.shape, k)
    },
)


def _tree_shapes(log_probs, token_ids, root_tokens, budgets, *, budget, keep_spine):
    batch, nodes = root_tokens.shape[0], budget + 1
    rows, words = (batch, nodes), (batch, nodes, -(-nodes // 32))
    shapes = [(rows, jnp.int32)] * 5 + [(words, jnp.uint32), (rows, jnp.float32)]
    return [jax.ShapeDtypeStruct(*one) for one in [*shapes, ((batch,), jnp.int32)]]


_tree_build = kernel_primitive(
    "tree_build",
    _tree_shapes,
    batch_axes=(0, 0, 0, 0),
    result_batch_axes=(0,) * 8,
    attributes=("keep_spine",),
    workspace={
        "cuda": lambda log_probs, *_, budget, keep_spine: workspace_bytes(
            "tree_build_workspace", *log_probs.shape, budget
        )
    },
)
