"""Compiles `ddtree_decode` once for a batch shape and runs prompts through it, streaming."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from compile_options import compile_options

import ddtree_jax
from ddtree_jax import DecodeConfig, FinishReason

# Prompts are padded to a multiple of this, so that prompts of like length share one compiled program.
_WIDTH_STEP = 64


@dataclasses.dataclass
class Completion:
    """One prompt's continuation. `tokens` leaves the prompt out; `mean_accepted` is tokens a round."""

    tokens: list[int]
    finish_reason: str
    rounds: int
    mean_accepted: float


@dataclasses.dataclass
class Totals:
    """Sums over every call of a `Runner`: decode time alone, without compilation or prefill."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_accepted(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


class Runner:
    """Decodes batches of prompts with one configuration.

    Args:
      target: a target model, as `ddtree_decode` takes it.
      drafter: a drafter, or None in mode "ar".
      config: its `max_rounds` is replaced.
      rounds_per_call: rounds between two looks at the result; None runs to the end in one call.
    """

    def __init__(self, target, drafter, config: DecodeConfig, rounds_per_call: int | None = None):
        self._target = target
        self._drafter = None if config.mode == "ar" else drafter
        self._config = config
        self._rounds_per_call = rounds_per_call
        self._programs = {}
        self.totals = Totals()

    def prepare(self, batch: int, longest: int):
        """Compiles for `batch` prompts of at most `longest` tokens; `run` does it when needed."""
        return self._compiled(batch, -(-longest // _WIDTH_STEP) * _WIDTH_STEP)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        on_tokens: Callable[[int, list[int]], None] | None = None,
        first: int = 0,
    ) -> list[Completion]:
        """Continues the prompts as one batch.

        Args:
          prompts: token ids of each prompt.
          on_tokens: called as `on_tokens(i, new_ids)` when prompt i of the batch has grown.
          first: the number of the batch's first prompt in the caller's list, for messages.

        Returns:
          One completion a prompt, in order.

        Raises:
          ValueError: an empty prompt, or one longer than the target's context.
        """
        for i, prompt in enumerate(prompts, first):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: give it at least one token")
            if len(prompt) > self._target.max_context:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens, but the target's context holds "
                    f"{self._target.max_context}: shorten it"
                )
        longest = max(map(len, prompts))
        prefill, loop, width = self.prepare(len(prompts), longest)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        tokens, lengths_device = jnp.asarray(tokens), jnp.asarray(lengths)

        start = time.perf_counter()
        result = jax.block_until_ready(prefill(self._target, self._drafter, tokens, lengths_device))
        self.totals.prefill_seconds += time.perf_counter() - start
        seen = lengths.copy()
        prefilled = np.asarray(result.lengths)
        self._report(result, seen, on_tokens)
        while np.any(np.asarray(result.finish_reason) == FinishReason.RUNNING):
            start = time.perf_counter()
            result = loop(self._target, self._drafter, tokens, lengths_device, state=result.state)
            jax.block_until_ready(result.finish_reason)
            self.totals.seconds += time.perf_counter() - start
            self._report(result, seen, on_tokens)
        return self._completions(result, lengths, prefilled)

    def _compiled(self, batch: int, width: int):
        key = (batch, width)
        if key not in self._programs:
            start = time.perf_counter()
            tokens = jax.ShapeDtypeStruct((batch, width), jnp.int32)
            lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
            # On a mesh every result is whole on each device, so that what one program returns fits the next.
            placement = getattr(self._target, "placement", None)
            placed = {} if placement is None else {"out_shardings": placement.whole}
            decode = jax.jit(
                ddtree_jax.ddtree_decode,
                static_argnames="config",
                donate_argnames="state",
                compiler_options=compile_options(),
                **placed,
            )
            models = (self._target, self._drafter)
            first = dataclasses.replace(self._config, max_rounds=0)
            later = dataclasses.replace(self._config, max_rounds=self._rounds_per_call)
            prefill = decode.lower(*models, tokens, lengths, config=first)
            state = prefill.out_info.state
            loop = decode.lower(*models, tokens, lengths, config=later, state=state)
            self._programs[key] = (prefill.compile(), loop.compile(), width)
            self.totals.compile_seconds += time.perf_counter() - start
        return self._programs[key]

    @staticmethod
    def _report(result, seen, on_tokens):
        lengths = np.asarray(result.lengths)
        if on_tokens is not None:
            tokens = np.asarray(result.tokens)
            for i in np.flatnonzero(lengths > seen):
                on_tokens(int(i), tokens[i, seen[i] : lengths[i]].tolist())
        seen[:] = lengths

    def _completions(self, result, prompt_lengths, prefilled):
        tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
        rounds, reasons = np.asarray(result.rounds), np.asarray(result.finish_reason)
        completions = []
        for i in range(len(lengths)):
            emitted = int(
                lengths[i] - prefilled[i]
            )  # The prefill emits the first token, no round does.
            self.totals.tokens += emitted
            self.totals.rounds += int(rounds[i])
            completions.append(
                Completion(
                    tokens=tokens[i, prompt_lengths[i] : lengths[i]].tolist(),
                    finish_reason=FinishReason(int(reasons[i])).name.lower(),
                    rounds=int(rounds[i]),
                    mean_accepted=emitted / int(rounds[i]) if rounds[i] else 0.0,
                )
            )
        return completions
