"""Times a whole step at Kimi K2.6's widths with as many layers as fit, and makes a cost curve of it.

A verify pass is timed at every number of nodes and every prefix, all nodes real and the root alone. Its stages are
then timed each by itself, over all layers: attention's projections, verify_attn, routed experts, head. What remains of
the pass (norms, router, shared experts, appended rows) is "rest"; it may fall below zero where a stage alone takes
longer than in the pass. Drafting and the tree's own machinery, which a round needs besides, are timed once, and so are
whole rounds of the decode loop: what they take beyond a pass and a draft is the machinery with all gaps. A stage that
grows with the layers is extrapolated to the published number of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import step_floors
import step_model
from compile_options import compile_options
from round_time import round_time
from step_floors import Rates

from ddtree_jax import (
    CostCurve,
    DecodeConfig,
    commit_path,
    draft_topk,
    tree_accept,
    tree_build,
    verify_attn,
)
from ddtree_jax.budget import node_budgets
from ddtree_jax.models.moe import expert_mlp

_RESERVE = 8 * 10**9  # bytes kept for activations, logits and the programs
STAGES = ("projections", "verify_attn", "experts", "head", "rest")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
      full: K2.6's widths; else small ones for a CPU.
      layers: of the target; None for as many as fit the device.
      nodes: sizes of the verify pass, ascending from 1.
      prefixes: context lengths.
      batch: requests.
      repeats: measurements that a median is taken of.
    """

    full: bool
    layers: int | None
    nodes: tuple[int, ...]
    prefixes: tuple[int, ...]
    batch: int
    repeats: int


@dataclasses.dataclass
class Step:
    """One pass: microseconds of each stage as measured, of its floor, and of both at the full depth."""

    nodes: int
    prefix: int
    idle: float
    times: dict[str, float]
    floors: dict[str, float]
    full_times: dict[str, float]
    full_floors: dict[str, float]


@dataclasses.dataclass
class Report:
    """All that was measured. `draft` and `machinery` are microseconds a round; the curve is for the full depth.

    `round_times` are microseconds of whole rounds of `round_nodes` nodes after the first prefix, by how XLA runs the
    loop; `round_parts` those of a pass and a draft like theirs, each alone.
    """

    layers: int
    full_layers: int
    batch: int
    steps: list[Step]
    draft: float
    draft_floor: float
    machinery: float
    curve_prefix: int
    cost_curve: CostCurve
    round_nodes: int
    round_times: dict[str, float]
    round_parts: float


def run(settings: Settings, rates: Rates, show=print) -> Report:
    """Measures, and reports each line as it comes."""
    full_config = step_model.target_config(settings.full)
    layers = settings.layers or fitting_layers(full_config, settings)
    config = step_model.target_config(settings.full, layers)
    target = step_model.random_target(config, seed=0)
    drafter = step_model.random_drafter(step_model.drafter_config(settings.full, layers), seed=1)
    show(f"{layers} of {full_config.num_hidden_layers} layers; microseconds, floors in brackets")
    show("".join(f"{name:>24}" for name in ("nodes, prefix", *STAGES, "pass", "full depth")))
    bench = _Bench(target, drafter, settings, rates)
    steps = []
    for prefix in settings.prefixes:
        for nodes in settings.nodes:
            step = bench.step(nodes, prefix, full_config)
            steps.append(step)
            show(_line(step))
    draft, draft_floor, machinery = bench.round_extras()
    show(f"drafter {draft:.0f} (floor {draft_floor:.0f}), tree machinery {machinery:.0f}")
    curve_prefix = settings.prefixes[len(settings.prefixes) // 2]
    curve = cost_curve([s for s in steps if s.prefix == curve_prefix], draft + machinery)
    show(f"cost curve at prefix {curve_prefix}: {curve}")
    nodes, prefix = _round_nodes(settings.nodes), settings.prefixes[0]
    parts = (
        bench.pass_time(bench.tree(nodes), jnp.full((settings.batch,), prefix, jnp.int32)) + draft
    )
    del bench.cache, bench.draft_cache  # the loop makes its own
    try:
        rounds = round_time(
            target,
            drafter,
            budget=nodes - 1,
            prefix=prefix,
            batch=settings.batch,
            repeats=settings.repeats,
        )
    except RuntimeError as error:  # memory, or random weights: what was measured before is kept
        rounds = {}
        show(f"no round was timed: {error}")
    for name, each in rounds.items():
        show(
            f"a round of {nodes} nodes after {prefix} tokens ({name}): {each:.0f}, "
            f"{each - parts:.0f} more than a pass and a draft alone"
        )
    return Report(
        layers,
        full_config.num_hidden_layers,
        settings.batch,
        steps,
        draft,
        draft_floor,
        machinery,
        curve_prefix,
        curve,
        nodes,
        rounds,
        parts,
    )


def _round_nodes(sizes: tuple[int, ...]) -> int:
    """The default budget's, or the size below it."""
    return max(size for size in sizes if size <= DecodeConfig().budget + 1)


def measure_curve(target, drafter, settings: Settings) -> CostCurve:
    """The curve of a given pair, from whole passes at the first prefix and the rest of a round; microseconds."""
    bench = _Bench(target, drafter, settings, Rates(math.inf, math.inf))
    lengths = jnp.full((settings.batch,), settings.prefixes[0], jnp.int32)
    verify, idle = [], []
    for nodes in settings.nodes:
        tree = bench.tree(nodes)
        verify.append(bench.pass_time(tree, lengths))
        alone = dataclasses.replace(tree, num_nodes=jnp.ones_like(tree.num_nodes))
        idle.append(bench.pass_time(alone, lengths))
    draft, _, machinery = bench.round_extras()
    return _curve(settings.nodes, verify, idle, draft + machinery)


def fitting_layers(config, settings: Settings) -> int:
    """How many layers fit the device beside drafter and caches; at most all, at least one mixture."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return min(config.num_hidden_layers, 4)
    drafter = step_model.drafter_config(settings.full, config.num_hidden_layers)
    fixed, each = step_model.layer_bytes(config)
    rows = settings.batch * cache_rows(settings, drafter.block_size)
    row = drafter.num_hidden_layers * 2 * drafter.num_key_value_heads * drafter.head_dim * 2
    free = stats["bytes_limit"] - _RESERVE - fixed - rows * row - step_model.drafter_bytes(drafter)
    most = int(free // (each + rows * 1152))
    if most < 1:
        raise ValueError(f"no mixture layer of {each / 1e9:.1f} GB fits the device")
    return min(config.num_hidden_layers, config.first_k_dense_replace + most)


def cache_rows(settings: Settings, block_size: int) -> int:
    """Rows of both caches: the longest prefix, and behind it the largest tree or the path of a whole block."""
    return max(settings.prefixes) + max(*settings.nodes, block_size)


def cost_curve(steps: list[Step], draft: float) -> CostCurve:
    """The passes of one prefix as the curve that the budgets are chosen by."""
    steps = sorted(steps, key=lambda step: step.nodes)
    whole = [sum(step.full_times.values()) for step in steps]
    return _curve([step.nodes for step in steps], whole, [step.idle for step in steps], draft)


def _curve(nodes, verify, idle, draft: float) -> CostCurve:
    # A pass of more nodes is never the faster one: where it seems so, the measurement wavered.
    idle = np.maximum.accumulate(idle)
    verify = np.maximum(idle, np.maximum.accumulate(verify))
    return CostCurve(tuple(nodes), tuple(verify), tuple(idle), draft)


def _line(step: Step) -> str:
    cells = [f"{step.nodes}, {step.prefix}"]
    columns = [(step.times[name], step.floors.get(name)) for name in STAGES]
    for times, floors in ((step.times, step.floors), (step.full_times, step.full_floors)):
        columns.append((sum(times.values()), sum(floors.values()) if floors else None))
    cells += [f"{t:.0f}" + ("" if floor is None else f" [{floor:.0f}]") for t, floor in columns]
    return "".join(f"{cell:>24}" for cell in cells)


def _jit(function, **options):
    """`jax.jit` for XLA's best on this device, of which nothing is asked before the first call."""

    @functools.cache
    def jitted():
        return jax.jit(function, compiler_options=compile_options(), **options)

    return functools.wraps(function)(lambda *args, **kwargs: jitted()(*args, **kwargs))


class _Bench:
    """One model and its programs; a program serves every prefix."""

    def __init__(self, target, drafter, settings: Settings, rates: Rates):
        self.target, self.drafter, self.settings, self.rates = target, drafter, settings, rates
        self.config = target.config
        rows = cache_rows(settings, drafter.block_size)
        self.cache = target.init_cache(settings.batch, rows)
        # Copies, since all its arrays start as one: a buffer can be donated but once.
        self.draft_cache = jax.tree.map(jnp.copy, drafter.init_cache(settings.batch, rows))

    def step(self, nodes: int, prefix: int, full_config) -> Step:
        settings, config, target = self.settings, self.config, self.target
        lengths = jnp.full((settings.batch,), prefix, jnp.int32)
        tree = self.tree(nodes)
        whole = self.pass_time(tree, lengths)
        alone = dataclasses.replace(tree, num_nodes=jnp.ones_like(tree.num_nodes))
        idle = self.pass_time(alone, lengths)

        x = _normal((settings.batch, nodes, config.hidden_size), nodes)
        query = _normal((settings.batch, nodes, config.num_attention_heads, 576), nodes + 1)
        rows = settings.batch * nodes
        mixtures = [layer for layer in target.layers if layer.is_moe]
        ids = _routing(len(mixtures), rows, config)
        shares = jnp.full((rows, config.num_experts_per_tok), 0.3, jnp.float32)
        flat = x.reshape(rows, -1)
        times = {
            "projections": self._time(_projections, target, x),
            "verify_attn": self._time(_attention, query, self.cache, lengths, tree),
            "experts": self._time(_experts, target, flat, ids, shares),
            "head": self._time(_head, target, x),
        }
        times["rest"] = whole - sum(times.values())
        floors = self._floors(nodes, prefix, ids)
        scale = functools.partial(_at_full_depth, layers=len(target.layers), full=full_config)
        full_times = scale(times, mixtures=len(mixtures))
        full_idle = idle * sum(full_times.values()) / max(sum(times.values()), 1e-9)
        return Step(
            nodes,
            prefix,
            full_idle,
            times,
            floors,
            full_times,
            scale(floors, mixtures=len(mixtures)),
        )

    def _floors(self, nodes: int, prefix: int, ids) -> dict[str, float]:
        """Of each stage, or none on a CPU, of which a GPU's rates say nothing."""
        if jax.default_backend() == "cpu":
            return {}
        target, rates, batch = self.target, self.rates, self.settings.batch
        rows = batch * nodes
        mixtures = [layer for layer in target.layers if layer.is_moe]
        rest = [layer.mlp.shared_experts if layer.is_moe else layer.mlp for layer in target.layers]
        attention = step_floors.attention(
            batch, prefix, nodes, self.config.num_attention_heads, rates
        )
        return {
            "projections": sum(
                step_floors.product(layer.self_attn, rows, rates) for layer in target.layers
            ),
            "verify_attn": len(target.layers) * attention,
            "experts": sum(
                step_floors.experts(layer.mlp.experts, one, rates)
                for layer, one in zip(mixtures, ids, strict=True)
            ),
            "head": step_floors.product(target.lm_head, rows, rates),
            "rest": sum(step_floors.product(mlp, rows, rates) for mlp in rest),
        }

    def round_extras(self) -> tuple[float, float, float]:
        """Microseconds of drafting, of its floor, and of the tree's machinery, at the largest size."""
        settings, target, drafter = self.settings, self.target, self.drafter
        prefix, nodes = self.settings.prefixes[0], max(settings.nodes)
        lengths = jnp.full((settings.batch,), prefix, jnp.int32)
        roots = jnp.zeros((settings.batch,), jnp.int32)
        logits = _normal((settings.batch, drafter.block_size - 1, self.config.vocab_size), 5)
        features = _normal(
            (settings.batch, drafter.block_size, len(drafter.taps) * self.config.hidden_size), 6
        )

        def propose():
            best, self.draft_cache = _draft(
                target, drafter, self.draft_cache, roots, lengths, features
            )
            return best

        draft = _median(propose, settings.repeats)
        floor = step_floors.product(drafter, settings.batch * drafter.block_size, self.rates)
        floor += step_floors.product(
            target.lm_head, settings.batch * drafter.block_size, self.rates
        )
        curve = CostCurve(tuple(settings.nodes), tuple(map(float, settings.nodes)))
        trees = _jit(functools.partial(_trees, nodes=nodes, curve=curve))
        times = [self._time(trees, logits.astype(jnp.float32), roots)]
        tree = self.tree(nodes)

        def commit(cache):
            path = tree_accept(tree, tree.tokens)
            return path, commit_path(cache, path, lengths)

        commit = _jit(commit, donate_argnums=0)

        def update():
            path, self.cache = commit(self.cache)
            return path.num_emitted

        times.append(_median(update, settings.repeats))
        return draft, floor, sum(times)

    def tree(self, nodes: int):
        depth, budget = self.drafter.block_size - 1, nodes - 1
        logits = _normal((self.settings.batch, depth, self.config.vocab_size), nodes)
        k = min(max(budget, 1), self.config.vocab_size)
        roots = jnp.zeros((self.settings.batch,), jnp.int32)
        return tree_build(*draft_topk(logits, k), roots, budget=budget, keep_spine=True)

    def pass_time(self, tree, lengths) -> float:
        def update():
            chosen, self.cache = _verify(
                self.target, self.cache, lengths, tree, taps=self.drafter.taps
            )
            return chosen

        return _median(update, self.settings.repeats)

    def _time(self, function, *operands) -> float:
        return _median(lambda: function(*operands), self.settings.repeats)


def _at_full_depth(
    stages: dict[str, float], *, layers: int, mixtures: int, full
) -> dict[str, float]:
    """Stages of all layers scaled to the full model's; the head is there once."""
    deep = full.num_hidden_layers
    deep_mixtures = sum(full.is_moe(layer) for layer in range(deep))
    factors = {"head": 1.0, "experts": deep_mixtures / max(mixtures, 1)}
    return {name: time * factors.get(name, deep / layers) for name, time in stages.items()}


@functools.partial(_jit, donate_argnums=1, static_argnames="taps")
def _verify(target, cache, lengths, tree, *, taps):
    hidden, features, cache = target.verify(tree, cache, lengths, taps=taps)
    return (jnp.argmax(target.head(hidden), axis=-1), features), cache


@_jit
def _projections(target, x):
    batch, nodes, _ = x.shape
    angles = jnp.zeros((batch, nodes, 32), x.dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    kept = []
    for layer in target.layers:
        rows = layer.self_attn.latents(x, cos, sin)
        query = layer.self_attn.absorbed_queries(x, cos, sin)
        kept.append(rows)
        x = x + layer.self_attn.project(query[..., :512])
    return x, kept


@_jit
def _attention(query, cache, lengths, tree):
    layers = range(cache.shape[0])
    return [verify_attn(query, cache, lengths, tree, scale=0.1447, layer=i) for i in layers]


@_jit
def _experts(target, x, ids, shares):
    mixtures = [layer.mlp.experts for layer in target.layers if layer.is_moe]
    return [expert_mlp(x, one, shares, layer) for one, layer in zip(ids, mixtures, strict=True)]


@_jit
def _head(target, x):
    return jnp.argmax(target.head(x), axis=-1)


@functools.partial(_jit, donate_argnums=2)
def _draft(target, drafter, cache, roots, lengths, features):
    """What a round asks of the drafter: a draft, and the accepted positions appended to its context."""
    logits = drafter.draft(target, cache, roots, lengths)
    counts = jnp.full_like(lengths, features.shape[1])
    return jnp.max(logits, axis=-1), drafter.extend(cache, features, lengths, counts)


def _trees(logits, roots, *, nodes, curve):
    k = min(max(nodes - 1, 1), logits.shape[-1])
    candidates = draft_topk(logits, k)
    best = tree_build(*candidates, roots, budget=nodes - 1)
    budgets, _ = node_budgets(best.log_probs, best.num_nodes, curve)
    return tree_build(*candidates, roots, budget=nodes - 1, budgets=budgets, keep_spine=True)


def _median(call, repeats: int, least: float = 0.02) -> float:
    """Median microseconds of a call, of runs of as many calls as take `least` seconds, queued one on another."""

    def seconds(count):
        start = time.perf_counter()
        for _ in range(count):
            last = call()
        jax.block_until_ready(last)
        return time.perf_counter() - start

    seconds(2)  # compiles; the second call may still capture a graph
    count = max(2, int(least / max(seconds(2) / 2, 1e-7)))
    return float(np.median([seconds(count) / count for _ in range(repeats)]) * 1e6)


def _normal(shape, seed):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _routing(mixtures: int, rows: int, config) -> jax.Array:
    """Ids i32[mixtures, rows, k], each row's drawn without repetition."""
    noise = jax.random.uniform(jax.random.key(3), (mixtures, rows, config.n_routed_experts))
    return jax.lax.top_k(noise, config.num_experts_per_tok)[1].astype(jnp.int32)
