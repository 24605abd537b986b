"""What a decode makes of each prompt, and sums of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddtree_jax import FinishReason


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
    undrafted_rounds: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_accepted(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


class Look:
    """Reads a batch's results and keeps a runner's totals.

    Args:
      totals: to add to.
      prompts: i32[B], the prompts' lengths, without the rows that hold none.
      prefilled: i32[>= B], lengths after the prefill, which emits the first token as no round does.
    """

    def __init__(self, totals: Totals, prompts, prefilled):
        self._totals, self._before = totals, dataclasses.replace(totals)
        self._prompts, self._prefilled = prompts, prefilled

    def __call__(self, result) -> list[Completion]:
        tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
        rounds, reasons = np.asarray(result.rounds), np.asarray(result.finish_reason)
        emitted = (lengths - self._prefilled).tolist()
        count = len(self._prompts)
        for name, values in {
            "tokens": emitted[:count],
            "rounds": rounds[:count],
            "undrafted_rounds": np.asarray(result.state.undrafted_rounds)[:count],
        }.items():
            setattr(self._totals, name, getattr(self._before, name) + int(sum(values)))
        return [
            Completion(
                tokens=tokens[i, self._prompts[i] : lengths[i]].tolist(),
                finish_reason=FinishReason(int(reasons[i])).name.lower(),
                rounds=int(rounds[i]),
                mean_accepted=emitted[i] / int(rounds[i]) if rounds[i] else 0.0,
            )
            for i in range(count)
        ]
