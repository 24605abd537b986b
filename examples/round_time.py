"""Times whole rounds of `ddtree_decode`: what a round costs beyond its two models."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from compile_options import compile_options
from loop_time import TimedLoop

from ddtree_jax import DecodeConfig, ddtree_decode
from ddtree_jax.cuda_graphs import whole_loop_options
from ddtree_jax.decode import draft_tree, verify_round

_ROUNDS = 32  # of a call: its start then weighs little


@dataclasses.dataclass(frozen=True)
class RoundTimes:
    """Microseconds of a round.

    Attributes:
      loops: rounds as a user has them, the host taking part, by how XLA was asked to run the loop: "default", and on
        CUDA "one graph" (`ddtree_jax.cuda_graphs.whole_loop_options`).
      device: one round over and over from the same state, in a loop on the device.
      models: its models alone, in such a loop: a draft, a pass over the same tree, the drafter's context.
    """

    loops: dict[str, float]
    device: float
    models: float

    @property
    def machinery(self) -> float:
        """What the tree costs on the device: candidates, tree, acceptance, kept rows, bookkeeping."""
        return max(self.device - self.models, 0.0)

    @property
    def gaps(self) -> float:
        """What the host costs where it takes part; 0 where there is nothing to compare with."""
        return max(self.loops["default"] - self.loops.get("one graph", self.loops["default"]), 0.0)


def round_times(
    target, drafter, *, budget: int, prefix: int, batch: int, repeats: int
) -> RoundTimes:
    """Medians of `repeats` measurements. Every call goes through the same rounds from the same state.

    Args:
      budget: draft nodes of a request.
      prefix: prompt tokens of each request; random.
      batch: requests.

    Raises:
      RuntimeError: a request ended before the last round.
    """
    # Room for whole blocks, so that no request ends before the last round.
    room = _ROUNDS * drafter.block_size + 1
    tokens = np.random.default_rng(7).integers(0, target.vocab_size, (batch, prefix), np.int32)
    lengths = np.full((batch,), prefix, np.int32)
    options = {"budget": budget, "max_new_tokens": room, "prefill_chunk": 256}

    def program(rounds, **compiler_options):
        # Of a random drafter as well, every round is to have a draft.
        config = DecodeConfig(max_rounds=rounds, adaptive=False, **options)

        def decode(target, drafter, tokens, lengths, state):
            return ddtree_decode(target, drafter, tokens, lengths, config=config, state=state)

        return jax.jit(decode, compiler_options={**compile_options(), **compiler_options})

    state = program(0)(target, drafter, tokens, lengths, None).state
    programs = {"default": program(_ROUNDS)}
    if jax.default_backend() == "gpu":
        programs["one graph"] = program(_ROUNDS, **whole_loop_options())
    loops = {}
    for name, run in programs.items():
        seconds = []
        for _ in range(repeats + 2):  # the first compiles, the second may still capture a graph
            start = time.perf_counter()
            result = run(target, drafter, tokens, lengths, state)
            result.tokens.block_until_ready()
            seconds.append(time.perf_counter() - start)
        if not np.all(np.asarray(result.rounds) == _ROUNDS):
            raise RuntimeError(f"a request ended after {np.min(result.rounds)} of {_ROUNDS} rounds")
        loops[name] = float(np.median(seconds[2:]) / _ROUNDS * 1e6)
    state = result.state
    del result
    return RoundTimes(loops, *_on_device(target, drafter, state, DecodeConfig(**options), repeats))


def _on_device(target, drafter, state, config, repeats) -> tuple[float, float]:
    """Microseconds of a round from this state, and of its models.

    The models go through the tree that the round has built, and so to the same experts, and in a round's order: without
    it XLA would make one product of both heads, which no round can.
    """
    tree = jax.jit(draft_tree, static_argnums=3)(target, drafter, state, config)
    carried = state.cache, state.draft_cache, tree
    rest = dataclasses.replace(state, cache=None, draft_cache=None)

    def whole(held, carried, rest):
        before = dataclasses.replace(rest, cache=carried[0], draft_cache=carried[1])
        tree = draft_tree(*held, before, config)
        after, path = verify_round(*held, before, tree, config)
        carried = after.cache, after.draft_cache, tree
        return (dataclasses.replace(after, cache=None, draft_cache=None), path), carried

    def models(held, carried, rest):
        (target, drafter), (cache, draft_cache, tree) = held, carried
        cached = rest.lengths - 1
        draft = drafter.draft(target, draft_cache, tree.tokens[:, 0], cached)
        draft, tree = jax.lax.optimization_barrier((draft, tree))
        hidden, features, cache = target.verify(tree, cache, cached, taps=drafter.taps)
        logits = target.head(hidden)
        logits, features = jax.lax.optimization_barrier((logits, features[:, : drafter.block_size]))
        # One position is the least that a round keeps; the products are over a block of them in any case.
        draft_cache = drafter.extend(draft_cache, features, cached, jnp.ones_like(cached))
        return (draft, logits), (cache, draft_cache, tree)

    # More rounds than a loop has by default: the two differ by little.
    held, rounds = (target, drafter), (2, 18)
    device, carried = TimedLoop(whole, rounds=rounds)(held, carried, rest, repeats=repeats)
    alone, _ = TimedLoop(models, rounds=rounds)(held, carried, rest, repeats=repeats)
    return device, alone
