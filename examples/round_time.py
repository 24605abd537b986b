"""Times whole rounds of `ddtree_decode`: what a round costs beyond its two models."""

from __future__ import annotations

import time

import jax
import numpy as np
from compile_options import compile_options

from ddtree_jax import DecodeConfig, ddtree_decode
from ddtree_jax.cuda_graphs import whole_loop_options

_ROUNDS = 32  # of a call: its start then weighs little


def round_time(
    target, drafter, *, budget: int, prefix: int, batch: int, repeats: int
) -> dict[str, float]:
    """Median microseconds of a round, by how XLA was asked to run the loop.

    The host takes part as it does for a user. Every call goes through the same rounds from the same state.

    Args:
      budget: draft nodes of a request.
      prefix: prompt tokens of each request; random.
      batch: requests.
      repeats: calls of which the median is taken.

    Returns:
      "default", and on CUDA "one graph" (`ddtree_jax.cuda_graphs.whole_loop_options`).
    """
    # Room for whole blocks, so that no request ends before the last round.
    room = _ROUNDS * drafter.block_size + 1
    tokens = np.random.default_rng(7).integers(0, target.vocab_size, (batch, prefix), np.int32)
    lengths = np.full((batch,), prefix, np.int32)
    options = {"budget": budget, "max_new_tokens": room, "prefill_chunk": 256}

    def program(rounds, **compiler_options):
        config = DecodeConfig(max_rounds=rounds, **options)

        def decode(target, drafter, tokens, lengths, state):
            return ddtree_decode(target, drafter, tokens, lengths, config=config, state=state)

        return jax.jit(decode, compiler_options={**compile_options(), **compiler_options})

    state = program(0)(target, drafter, tokens, lengths, None).state
    programs = {"default": program(_ROUNDS)}
    if jax.default_backend() == "gpu":
        programs["one graph"] = program(_ROUNDS, **whole_loop_options())
    times = {}
    for name, run in programs.items():
        seconds = []
        for _ in range(repeats + 2):  # the first compiles, the second may still capture a graph
            start = time.perf_counter()
            result = run(target, drafter, tokens, lengths, state)
            result.tokens.block_until_ready()
            seconds.append(time.perf_counter() - start)
        if not np.all(np.asarray(result.rounds) == _ROUNDS):
            raise RuntimeError(f"a request ended after {np.min(result.rounds)} of {_ROUNDS} rounds")
        times[name] = float(np.median(seconds[2:]) / _ROUNDS * 1e6)
    return times
