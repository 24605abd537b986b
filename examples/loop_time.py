"""Device time of one step: the difference between a long and a short jitted loop of it.

Neither dispatch nor the loop's start counts then. On CUDA the loop is one CUDA graph, so that nothing of a round waits
for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from compile_options import compile_options

from ddtree_jax.cuda_graphs import whole_loop_options


class TimedLoop:
    """A loop around `step(held, state, *operands)`, which returns (results, state).

    Args:
      step: what to time; pytrees of arrays all. Every round is made to depend on the one before, so that no step is
        dropped or moved out of the loop. What depends on `held` alone may be moved out, as in a decode loop.
      known: rounds are part of the program, which XLA then need not count on the device, but compiles for each number
        of them. Otherwise one program serves all numbers.
      rounds: of the short and the long loop, to begin with.
    """

    def __init__(
        self, step: Callable, *, known: bool = False, rounds: tuple[int, int] | None = None
    ):
        def loop(count, state, held, operands):
            def body(_, carry):
                state, number = carry
                tied, number = jax.lax.optimization_barrier((operands, number))
                results, state = step(held, state, *tied)
                results, number = jax.lax.optimization_barrier((results, number))
                # One number of each result keeps it alive; reading them costs next to nothing.
                ends = [x.ravel()[0].astype(jnp.float32) * 0 for x in jax.tree.leaves(results)]
                return state, number + sum(ends)

            return jax.lax.fori_loop(0, count, body, (state, jnp.float32(0)))

        self._loop, self._known = loop, known
        self._rounds = rounds or ((4, 36) if known else (1, 5))
        self._jitted = None

    def __call__(self, held, state, *operands, repeats: int, least: float = 2e-2):
        """Median microseconds of a round, and the state.

        Args:
          held: passed to every step as it is, weights for instance.
          state: carried from step to step and given up: its buffers are reused.
          operands: passed to every step.
          repeats: differences of which the median is taken.
          least: seconds that lie between the loops at least; they are lengthened until it is so.
        """

        def run(count):
            nonlocal state
            state, number = self._program()(count, state, held, operands)
            number.block_until_ready()

        def seconds(count):
            start = time.perf_counter()
            run(count)
            return time.perf_counter() - start

        short, long = self._rounds
        while True:
            # The first call on CUDA runs without the graph, the second makes it.
            for _ in range(3):
                run(short), run(long)
            if seconds(long) - seconds(short) > least or long > 20000:
                break
            short, long = 4 * short, 4 * long
        taken = [(seconds(long) - seconds(short)) / (long - short) for _ in range(repeats)]
        return float(np.median(taken) * 1e6), state

    def _program(self):
        """The jitted loop. Nothing is asked of a device before the first call."""
        if self._jitted is None:
            options = compile_options()
            if jax.default_backend() == "gpu":
                # One kernel after the other, as if the step stood alone.
                serial = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
                options = {**options, **whole_loop_options(), **serial}
            known = (0,) if self._known else ()
            self._jitted = jax.jit(
                self._loop, compiler_options=options, static_argnums=known, donate_argnums=1
            )
        return self._jitted


def per_call(step: Callable, *operands, repeats: int, calls: int = 8, least: float = 2e-3) -> float:
    """Microseconds of `step(*operands)`.

    The calls of a round have copies of the operands, since equal calls would become one.
    """
    calls = calls if jax.default_backend() == "gpu" else 1
    copies = [jax.tree.map(jnp.copy, operands) for _ in range(calls)]
    loop = TimedLoop(lambda _, state, copies: ([step(*each) for each in copies], state), known=True)
    return loop((), (), copies, repeats=repeats, least=least)[0] / calls


def per_update(step: Callable, cache, *operands, repeats: int, calls: int = 8) -> float:
    """Microseconds of `step(cache, *operands)`, which returns the cache, updated in place."""

    def steps(operands, cache):
        for _ in range(calls):
            cache = step(cache, *operands)
        return (), cache

    loop = TimedLoop(steps, known=True)
    return loop(operands, cache, repeats=repeats, least=2e-3)[0] / calls
