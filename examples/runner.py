"""Compiles `ddtree_decode` once for a batch shape and runs prompts through it, streaming.

Few things are in a program: seed, temperature, the prompts' lengths and how many tokens they may get are its
arguments. The columns for prompts and for new tokens are powers of two where memory allows it, so that another run
finds its program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import memory
import numpy as np
from compile_options import compile_options
from completions import Completion, Look, Totals
from sizes import multiples, powers_of_two

import ddtree_jax
from ddtree_jax import DecodeConfig, FinishReason, sampling

_WAY_ROUND = "lower --batch_size or --max_new_tokens"
# Between the request ids of a prompt's samples; odd, so that no two of 2^32 are the same.
_APART = np.uint32(0x9E3779B1).astype(np.int32)


class Runner:
    """Decodes batches of prompts with one configuration.

    Args:
      target: a target model, as `ddtree_decode` takes it.
      drafter: a drafter, or None in mode "ar".
      config: its `max_rounds` is replaced.
      rounds_per_call: rounds between two looks at the result; None runs to the end in one call.
      compiling: wraps each compilation, and is called with the number of prompts and the columns of each.
    """

    def __init__(
        self,
        target,
        drafter,
        config: DecodeConfig,
        rounds_per_call: int | None = None,
        compiling: Callable[[int, int], contextlib.AbstractContextManager] | None = None,
    ):
        self._target = target
        self._drafter = None if config.mode == "ar" else drafter
        self._asked = config
        self._config = dataclasses.replace(
            config, seed=0, temperature=1.0 if config.temperature > 0 else 0.0
        )
        self._rounds_per_call = rounds_per_call
        self._compiling = compiling or (lambda prompts, width: contextlib.nullcontext())
        self._programs = {}
        self.totals = Totals()

    def prepare(self, batch: int, longest: int):
        """Compiles for up to `batch` prompts of at most `longest` tokens; `run` does it when needed.

        Raises:
          MemoryError: their caches do not fit; the message names the flags to lower.
        """
        fits = [size for size in self._programs if size[0] >= batch and size[1] >= longest]
        if fits:
            size = min(fits, key=math.prod)
            return *self._programs[size], size
        began = time.perf_counter()
        try:
            made = self._compiled(batch, longest, powers_of_two)
        except MemoryError:
            made = self._compiled(batch, longest, multiples)
        self.totals.compile_seconds += time.perf_counter() - began
        *programs, size = made
        self._programs[size] = programs
        return made

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
        on_progress: Callable[[list[Completion]], None] | None = None,
        first: int = 0,
    ) -> list[Completion]:
        """Continues the prompts as one batch.

        Args:
          prompts: token ids of each prompt.
          samples: numbers that tell equal prompts apart where tokens are drawn, 0 for each by default. What a
            prompt of some number gets is the same in every batch.
          on_progress: called with the completions so far, those of finish reason "running" too, after the prefill
            and after each call.
          first: the number of the batch's first prompt in the caller's list, for messages.

        Returns:
          One completion a prompt, in order.

        Raises:
          ValueError: an empty prompt, or one longer than the target's context.
          MemoryError: what they need does not fit; the message names the flags to lower.
        """
        for i, prompt in enumerate(prompts, first):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: give it at least one token")
            if len(prompt) > self._target.max_context:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens, but the target's context holds "
                    f"{self._target.max_context}: shorten it"
                )
        with memory.naming(_WAY_ROUND):
            return self._run(prompts, samples or [0] * len(prompts), on_progress)

    def _run(self, prompts, samples, on_progress):
        start, loop, (batch, width) = self.prepare(len(prompts), max(map(len, prompts)))
        tokens = np.zeros((batch, width), np.int32)
        lengths = np.zeros(
            batch, np.int32
        )  # A row without a prompt is a request that ends at once.
        numbers = np.zeros(batch, np.int32)
        for i, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
            tokens[i, : len(prompt)], lengths[i], numbers[i] = prompt, len(prompt), sample
        models = self._target, self._drafter
        # Where they lie is not told, so that a mesh's program takes them too.
        given = jnp.asarray(tokens), jnp.asarray(lengths)
        asked = self._asked
        limit = min(asked.max_new_tokens, self._target.max_context)
        settings = {
            "seed": np.uint32(asked.seed % 2**32),
            "max_new": np.full(batch, limit, np.int32),
        }
        if asked.temperature > 0:
            settings["temperature"] = np.float32(asked.temperature)

        began = time.perf_counter()
        result = jax.block_until_ready(start(*models, *given, numbers, **settings))
        self.totals.prefill_seconds += time.perf_counter() - began
        look = Look(self.totals, lengths[: len(prompts)], np.asarray(result.lengths))
        completions = look(result)
        while True:
            if on_progress is not None:
                on_progress(completions)
            if not np.any(np.asarray(result.finish_reason) == FinishReason.RUNNING):
                return completions
            began = time.perf_counter()
            result = loop(*models, *given, state=result.state)
            jax.block_until_ready(result.finish_reason)
            self.totals.seconds += time.perf_counter() - began
            completions = look(result)

    def _compiled(self, batch: int, longest: int, rounded: Callable[[int, int], int]):
        """The two programs, and the number and the columns of the prompts that they take.

        Raises:
          MemoryError: what they hold does not fit.
        """
        context = self._target.max_context
        width, new = rounded(longest, context), rounded(self._asked.max_new_tokens, context)
        with memory.naming(_WAY_ROUND), self._compiling(batch, width):
            return *self._programs_of(batch, width, new), (batch, width)

    def _programs_of(self, batch: int, width: int, new: int):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        given = shape((batch, width)), shape((batch,))
        settings = {"seed": shape((), dtype=jnp.uint32), "max_new": shape((batch,))}
        if self._asked.temperature > 0:
            settings["temperature"] = shape((), dtype=jnp.float32)
        # On a mesh every result is whole on each device, so that what one program returns fits the next.
        placement = getattr(self._target, "placement", None)
        placed = {} if placement is None else {"out_shardings": placement.whole}
        jit = functools.partial(
            jax.jit, static_argnames="config", compiler_options=compile_options(), **placed
        )
        models = (self._target, self._drafter)
        first, later = (
            dataclasses.replace(self._config, max_new_tokens=new, max_rounds=rounds)
            for rounds in (0, self._rounds_per_call)
        )
        start = jit(_start).lower(*models, *given, shape((batch,)), config=first, **settings)
        state = start.out_info.state
        held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        rows = state.cache.shape[2]
        what = f"the caches of {batch} requests with {rows:,} positions each"
        memory.check(held, what, _WAY_ROUND, compiled=False)
        loop = jit(ddtree_jax.ddtree_decode, donate_argnames="state")
        loop = loop.lower(*models, *given, config=later, state=state)
        start, loop = start.compile(), loop.compile()
        most = max(_fresh_bytes(start), held + _fresh_bytes(loop))
        memory.check(most, f"a round and {what}", _WAY_ROUND, compiled=True)
        return start, loop


def _start(target, drafter, tokens, lengths, samples, *, config, **settings):
    """`ddtree_decode`'s start; a prompt's first sample is what it gets without request ids."""
    request_ids = sampling.prompt_ids(tokens, lengths) + samples * _APART
    return ddtree_jax.ddtree_decode(
        target, drafter, tokens, lengths, config=config, request_ids=request_ids, **settings
    )


def _fresh_bytes(program) -> int:
    """Bytes that a call allocates."""
    size = program.memory_analysis()
    if size is None:
        return 0
    return size.temp_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes
