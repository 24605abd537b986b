"""Times a whole step at Kimi K2.6's widths with as many layers as fit, and makes a cost curve of it.

A verify pass is timed at every number of nodes and every prefix, all nodes real and the root alone. Its stages are
then timed each by itself, over all layers: attention's projections, verify_attn, routed experts (those that the
pass went to), head. What remains of it (norms, router, shared experts, appended rows) is "rest"; it may fall below zero
where a stage alone takes longer than in the pass. Drafting and the tree's own machinery, which a round needs besides,
are timed once. All of these are loops on the device (loop_time.py). Whole rounds of the decode loop are timed as a user
has them: what they take beyond a pass and a draft is the machinery with all gaps. A stage that grows with the layers is
extrapolated to the published number of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import step_floors
import step_model
import step_stages
from loop_time import TimedLoop
from round_time import RoundTimes, round_times
from step_floors import Rates

from ddtree_jax import CostCurve, DecodeConfig, draft_topk, tree_build

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
    """One pass: microseconds of each stage as measured, of its floor, and of both at the full depth.

    `touched` is how many experts of a layer its nodes went to, the mean over the layers; `idle` the pass with the
    roots alone at the full depth.
    """

    nodes: int
    prefix: int
    touched: float
    idle: float
    times: dict[str, float]
    floors: dict[str, float]
    full_times: dict[str, float]
    full_floors: dict[str, float]


@dataclasses.dataclass
class Report:
    """All that was measured. `draft` and `machinery` are microseconds a round; the curve is for the full depth.

    `machinery` is its kernels each alone, at the largest size. `rounds` are of `round_nodes` nodes after the first
    prefix, and `overhead` the share of them, at the full depth, that is neither drafter nor target.
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
    rounds: RoundTimes | None
    overhead: float | None


def run(settings: Settings, rates: Rates, show=print) -> Report:
    """Measures, and reports each line as it comes."""
    full_config = step_model.target_config(settings.full)
    layers = settings.layers or fitting_layers(full_config, settings)
    config = step_model.target_config(settings.full, layers)
    target = step_model.random_target(config, seed=0)
    drafter = step_model.random_drafter(step_model.drafter_config(settings.full, layers), seed=1)
    show(f"{layers} of {full_config.num_hidden_layers} layers; microseconds, floors in brackets")
    show("".join(f"{name:>20}" for name in ("nodes, prefix", *STAGES, "pass", "full depth")))
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
    del bench.cache, bench.draft_cache  # the loop makes its own
    report = Report(
        layers=layers,
        full_layers=full_config.num_hidden_layers,
        batch=settings.batch,
        steps=steps,
        draft=draft,
        draft_floor=draft_floor,
        machinery=machinery,
        curve_prefix=curve_prefix,
        cost_curve=curve,
        round_nodes=nodes,
        rounds=None,
        overhead=None,
    )
    try:
        rounds = round_times(
            target,
            drafter,
            budget=nodes - 1,
            prefix=prefix,
            batch=settings.batch,
            repeats=settings.repeats,
        )
    except RuntimeError as error:  # memory, or random weights: what was measured before is kept
        show(f"no round was timed: {error}")
        return report
    overhead = _overhead(rounds, layers, full_config.num_hidden_layers)
    loops = ", ".join(f"{name} {each:.0f}" for name, each in rounds.loops.items())
    show(
        f"a round of {nodes} nodes after {prefix} tokens: {loops}; on the device {rounds.device:.0f}, "
        f"its models {rounds.models:.0f}; machinery and gaps at the full depth {overhead:.1%}"
    )
    return dataclasses.replace(report, rounds=rounds, overhead=overhead)


def _overhead(rounds: RoundTimes, layers: int, full_layers: int) -> float:
    """Share of a round at the full depth that is not its models'; the host's part grows with the layers."""
    deeper = full_layers / layers
    extra = rounds.machinery + rounds.gaps * deeper
    return extra / (rounds.models * deeper + extra)


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
        verify.append(bench.pass_time(tree, lengths)[0])
        idle.append(bench.pass_time(_roots_alone(tree), lengths)[0])
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
    line = "".join(f"{cell:>20}" for cell in cells)
    return f"{line}   {step.touched:.0f} experts a layer"


class _Bench:
    """One model and its programs; a program serves every prefix."""

    def __init__(self, target, drafter, settings: Settings, rates: Rates):
        self.target, self.drafter, self.settings, self.rates = target, drafter, settings, rates
        self.config = target.config
        rows = cache_rows(settings, drafter.block_size)
        self.cache = target.init_cache(settings.batch, rows)
        # Copies, since all its arrays start as one: a buffer can be donated but once.
        self.draft_cache = jax.tree.map(jnp.copy, drafter.init_cache(settings.batch, rows))
        self._pass = TimedLoop(functools.partial(step_stages.verify, taps=drafter.taps))
        self._stages = {
            name: TimedLoop(step)
            for name, step in [
                ("projections", step_stages.projections),
                ("verify_attn", step_stages.attention),
                ("experts", step_stages.experts),
                ("head", step_stages.head),
            ]
        }

    def step(self, nodes: int, prefix: int, full_config) -> Step:
        settings, config, target = self.settings, self.config, self.target
        lengths = jnp.full((settings.batch,), prefix, jnp.int32)
        tree = self.tree(nodes)
        idle, _ = self.pass_time(_roots_alone(tree), lengths)
        whole, ids = self.pass_time(tree, lengths)

        x = _normal((settings.batch, nodes, config.hidden_size), nodes)
        query = _normal((settings.batch, nodes, config.num_attention_heads, 576), nodes + 1)
        rows = settings.batch * nodes
        shares = jnp.full((rows, config.num_experts_per_tok), 0.3, jnp.float32)
        times = {
            "projections": self._time("projections", x),
            "verify_attn": self._attention_time(query, lengths, tree),
            "experts": self._time("experts", x.reshape(rows, -1), ids, shares),
            "head": self._time("head", x),
        }
        times["rest"] = whole - sum(times.values())
        floors = self._floors(nodes, prefix, ids)
        scale = functools.partial(
            _at_full_depth, layers=len(target.layers), mixtures=len(ids), full=full_config
        )
        full_times = scale(times)
        # What more nodes than the root cost beyond their rows is experts.
        full_idle = sum(full_times.values()) - scale({"experts": whole - idle})["experts"]
        touched = float(np.mean([len(np.unique(one)) for one in np.asarray(ids)]))
        return Step(nodes, prefix, touched, full_idle, times, floors, full_times, scale(floors))

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

        draft, self.draft_cache = TimedLoop(step_stages.draft)(
            (target, drafter),
            self.draft_cache,
            *(roots, lengths, features),
            repeats=settings.repeats,
        )
        floor = step_floors.product(drafter, settings.batch * drafter.block_size, self.rates)
        floor += step_floors.product(
            target.lm_head, settings.batch * drafter.block_size, self.rates
        )
        curve = CostCurve(tuple(settings.nodes), tuple(map(float, settings.nodes)))
        build = functools.partial(step_stages.trees, nodes=nodes, curve=curve)
        building, _ = TimedLoop(build)(
            (), (), logits.astype(jnp.float32), roots, repeats=settings.repeats
        )
        committing, self.cache = TimedLoop(step_stages.commit)(
            (), self.cache, self.tree(nodes), lengths, repeats=settings.repeats
        )
        return draft, floor, building + committing

    def tree(self, nodes: int):
        depth, budget = self.drafter.block_size - 1, nodes - 1
        logits = _normal((self.settings.batch, depth, self.config.vocab_size), nodes)
        k = min(max(budget, 1), self.config.vocab_size)
        roots = jnp.zeros((self.settings.batch,), jnp.int32)
        return tree_build(*draft_topk(logits, k), roots, budget=budget, keep_spine=True)

    def pass_time(self, tree, lengths) -> tuple[float, jax.Array]:
        """Microseconds of a verify pass, and the experts that its nodes went to."""
        state = self.cache, step_stages.no_routes(self.target, tree.tokens.size)
        time, (self.cache, ids) = self._pass(
            (self.target,), state, lengths, tree, repeats=self.settings.repeats
        )
        return time, ids

    def _attention_time(self, query, lengths, tree) -> float:
        time, self.cache = self._stages["verify_attn"](
            (), self.cache, query, lengths, tree, repeats=self.settings.repeats
        )
        return time

    def _time(self, stage, *operands) -> float:
        repeats = self.settings.repeats
        return self._stages[stage]((self.target,), (), *operands, repeats=repeats)[0]


def _roots_alone(tree):
    return dataclasses.replace(tree, num_nodes=jnp.ones_like(tree.num_nodes))


def _at_full_depth(
    stages: dict[str, float], *, layers: int, mixtures: int, full
) -> dict[str, float]:
    """Stages of all layers scaled to the full model's; the head is there once."""
    deep = full.num_hidden_layers
    deep_mixtures = sum(full.is_moe(layer) for layer in range(deep))
    factors = {"head": 1.0, "experts": deep_mixtures / max(mixtures, 1)}
    return {name: time * factors.get(name, deep / layers) for name, time in stages.items()}


def _normal(shape, seed):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
