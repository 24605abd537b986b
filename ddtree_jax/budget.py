"""How many nodes a round's trees get: the number that promises the most tokens a second.

CaDDTree (arXiv 2606.01813) lets a best-first tree grow while (1 + sum of its nodes' probabilities) / (time of
drafting + time of verifying that many nodes) rises. Its stop at the first fall needs a convex cost; a measured
one is a staircase, so here every size is weighed. A pass has a static shape under XLA, hence a few sizes N with
measured times; inside a size, nodes that are not there still save what they would have read, which on a mixture
of experts is most of what they cost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import _checks
from ddtree_jax.tree import MAX_BUDGET, DraftTree

_WIDEST = 1e30  # between two times of a curve: float32 holds their ratios and sums


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Measured times of a round for one model, device and batch size; in one unit, whichever. Hashable.

    `examples/benchmark.py` measures one (`--suite=curve` of a checkpoint, `--suite=step` at K2.6's widths).

    Attributes:
      nodes: sizes N of a verify pass, nodes a request with the root; ascending, the first is 1, which is a
        step of plain decoding.
      verify: time of the pass of each size when every node of every request is there.
      idle: the same with the roots alone there, never falling; `verify` by default, nodes inside a size then
        cost nothing. What nodes cost beyond it, `verify - idle`, is interpolated between the sizes.
      draft: time of everything else of a round: drafting, the tree, acceptance.

    Raises:
      ValueError: lengths that differ, sizes that do not ascend from 1, a time that is not finite and above 0
        (`draft` may be 0) or more than 1e30 times another, `idle` that falls or lies above `verify`.
    """

    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    idle: tuple[float, ...] | None = None
    draft: float = 0.0

    def __post_init__(self):
        sizes = _listed("nodes", self.nodes)
        nodes = tuple(_checks.between("each of nodes", n, 1, MAX_BUDGET + 1) for n in sizes)
        times = _listed("verify", self.verify)
        verify = tuple(_checks.number("each of verify", t) for t in times)
        times = verify if self.idle is None else _listed("idle", self.idle)
        idle = tuple(_checks.number("each of idle", t) for t in times)
        draft = _checks.number("draft", self.draft)
        if not nodes or nodes[0] != 1 or list(nodes) != sorted(set(nodes)):
            raise ValueError(f"nodes must ascend from 1, not {list(nodes)}")
        if not len(nodes) == len(verify) == len(idle):
            raise ValueError(
                f"nodes, verify and idle must have one length, not {len(nodes)}, {len(verify)} and {len(idle)}"
            )
        if not all(math.isfinite(t) and t > 0 for t in (*verify, *idle)):
            raise ValueError("each of verify and idle must be finite and above 0")
        if not (math.isfinite(draft) and draft >= 0):
            raise ValueError(f"draft must be finite and at least 0, not {draft}")
        if max(*verify, draft) / min(idle) > _WIDEST:
            raise ValueError(
                f"no time may be more than {_WIDEST:.0e} times another, and draft, verify and idle go from "
                f"{min(idle)} to {max(*verify, draft)}: leave out what is no measurement"
            )
        if any(some > full for some, full in zip(idle, verify, strict=True)):
            raise ValueError("no pass may take longer idle than full")
        if list(idle) != sorted(idle):
            raise ValueError(f"idle must not fall with the size, not {list(idle)}")
        for name, value in (("nodes", nodes), ("verify", verify), ("idle", idle), ("draft", draft)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> CostCurve:
        """Reads the object under "cost_curve" of a file that `benchmark.py --json` wrote.

        Raises:
          OSError: the file cannot be read.
          ValueError: it is no JSON, or holds no curve, or one that is no curve; the message names the file.
        """
        with open(path, encoding="utf-8") as file:
            try:
                content = json.load(file)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{os.fspath(path)}: not valid JSON ({error}); benchmark.py --json writes a curve's file"
                ) from error
        names = {field.name for field in dataclasses.fields(cls)}
        curve = content.get("cost_curve") if isinstance(content, dict) else None
        if not isinstance(curve, dict) or not {"nodes", "verify"} <= set(curve) <= names:
            raise ValueError(
                f"{os.fspath(path)} has no object cost_curve of {', '.join(sorted(names))}"
            )
        values = {name: tuple(x) if isinstance(x, list) else x for name, x in curve.items()}
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: cost_curve: {error}") from error

    def sizes(self, capacity: int) -> tuple[int, ...]:
        """The sizes that are no larger than `capacity` nodes."""
        return tuple(n for n in self.nodes if n <= capacity)

    def full_pass(self, nodes: int) -> float:
        """The time of a round whose requests all verify so many nodes, in steps of plain decoding."""
        verify = float(np.interp(nodes, self.nodes, self.verify))
        return (self.draft + verify) / self.verify[0]


def _listed(name: str, values) -> tuple:
    """`values` as a tuple.

    Raises:
      ValueError: they are no sequence, or text.
    """
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        return tuple(values)
    except TypeError as error:
        raise ValueError(f"{name} must be a tuple of numbers, not {values!r}") from error


def node_budgets(log_probs, num_nodes, curve: CostCurve) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The budget of each request that makes the round's expected tokens a second the greatest.

    A request expects 1 + the sum of its nodes' probabilities; all requests share one pass, whose size is that
    of the largest tree. The best m nodes of a batch are its m most probable ones, so every m is weighed in
    every size. A tree that does not pay ends as the root alone.

    Args:
      log_probs: f32[B, N] cumulative, of best-first trees: `tree_build(...).log_probs` without `keep_spine`.
      num_nodes: i32[B], the root counted; 0 for a request that takes no part.
      curve: sizes above N are left out.

    Returns:
      i32[B], draft nodes of each request, root excluded; bool[], whether the round, drafting included, promises
      more than a step of plain decoding without a draft; and f32[], the round's time in such steps.

    Raises:
      ValueError: another dtype or shape.
    """
    log_probs = _checks.array("log_probs", log_probs, ("B", "N"), jnp.float32)
    batch, capacity = log_probs.shape
    _checks.between("log_probs' nodes N", capacity, 1, MAX_BUDGET + 1)
    num_nodes = _checks.array("num_nodes", num_nodes, (batch,), jnp.int32)
    sizes = jnp.asarray(curve.sizes(capacity), jnp.int32)
    # Whatever the curve's unit, float32 holds the times in that of a step of plain decoding.
    idle, verify = (
        jnp.asarray([time / curve.verify[0] for time in times], jnp.float32)
        for times in (curve.idle, curve.verify)
    )

    index = jnp.arange(1, capacity, dtype=jnp.int32)
    there = index < num_nodes[:, None]
    mass = jnp.where(there, jnp.exp(log_probs[:, 1:]), 0.0).ravel()
    request, node = (
        x.ravel() for x in jnp.broadcast_arrays(jnp.arange(batch, dtype=jnp.int32)[:, None], index)
    )
    if batch > 1:
        # Stable, so that of equal nodes of a request the earlier one, which may be the parent, goes first.
        order = jnp.argsort(-mass, stable=True)
        mass, request, node = mass[order], request[order], node[order]
    # [sizes, m]: after how many of the sorted nodes to stop, from none on.
    fits = (node < sizes[:, None]) & (mass > 0)
    nothing = jnp.zeros((len(sizes), 1), jnp.float32)
    count = jnp.cumsum(jnp.concatenate([nothing, fits], axis=1), axis=1)
    gain = jnp.cumsum(jnp.concatenate([nothing, jnp.where(fits, mass, 0.0)], axis=1), axis=1)
    tokens = jnp.sum(num_nodes > 0) + gain
    node_time = jnp.interp(1 + count / batch, jnp.asarray(curve.nodes, jnp.float32), verify - idle)
    time = curve.draft / curve.verify[0] + idle[: len(sizes), None] + node_time
    rate = tokens / time
    best = jnp.argmax(rate)
    size, stop = jnp.divmod(best, count.shape[1])
    taken = fits[size] & (jnp.arange(mass.size) < stop)
    budgets = jnp.zeros((batch,), jnp.int32).at[request].add(taken.astype(jnp.int32))
    return budgets, jnp.max(rate) > jnp.sum(num_nodes > 0) / verify[0], time.ravel()[best]


def first_nodes(tree: DraftTree, nodes: int) -> DraftTree:
    """The tree's first `nodes` rows as a tree of that capacity; those that are cut off must be unused."""
    words = -(-nodes // 32)
    rows = {
        field: getattr(tree, field)[:, :nodes]
        for field in ("tokens", "parents", "depths", "next_token", "next_sibling", "log_probs")
    }
    depth = min(tree.max_depth, nodes - 1)
    ancestors = tree.ancestors[:, :nodes, :words]
    return dataclasses.replace(tree, ancestors=ancestors, max_depth=depth, **rows)
