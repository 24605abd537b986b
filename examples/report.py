"""What `generate.py --json` writes, kept up to date, so that no early end loses a text that is there."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Sequence

from output import write
from prompts import Request

_SECONDS = 30.0  # between two times that the file is written, should the process be killed


class Report:
    """The completions so far.

    Args:
      path: the file to write; None for none.
      tokenizer: of the target.
      requests: all that are to be decoded, in order.
      device: the device's name.
    """

    def __init__(
        self, path: pathlib.Path | None, tokenizer, requests: Sequence[Request], device: str
    ):
        self._path, self._tokenizer, self._requests = path, tokenizer, requests
        self._device = device
        self._several = any(request.sample for request in requests)
        self._mode, self._totals = "", None
        self._finished, self._current = [], []
        self._saved = time.monotonic()
        self.tables = {}

    def begin(self, mode: str, totals):
        """What follows is decoded in `mode`; `totals` are the runner's, and change with it."""
        self._mode, self._totals = mode, totals
        self._finished, self._current = [], []

    def progress(self, completions):
        """The completions so far of the batch that runs."""
        self._current = completions

    def finish(self, completions):
        """The batch's completions."""
        # Ctrl-C may come between any two lines, and ask for all of it in another thread.
        self._finished, self._current = [*self._finished, *completions], []
        if time.monotonic() > self._saved + _SECONDS:
            self.save()

    @property
    def finished(self) -> int:
        """How many texts of the mode are whole."""
        return sum(one.finish_reason != "running" for one in [*self._finished, *self._current])

    def values(self) -> dict:
        """The object that is written; what was cut off has the finish reason "interrupted"."""
        ones = [*self._finished, *self._current]
        return {
            "mode": self._mode,
            "device": self._device,
            "tokens_per_second": 0.0 if self._totals is None else self._totals.tokens_per_second,
            "completions": [self._entry(*pair) for pair in zip(self._requests, ones, strict=False)],
            **self.tables,
        }

    def save(self):
        """Writes the file, if one was asked for.

        Raises:
          OSError: the message names --json.
        """
        if self._path is not None:
            write("json", self._path, json.dumps(self.values(), indent=1) + "\n")
            self._saved = time.monotonic()

    def save_early(self) -> str:
        """Writes what there is at an early end, and returns what to say of it: nothing if there is nothing."""
        if not self._finished and not self._current:
            return ""
        self.save()
        kept = "" if self._path is None else f"; all so far is in {self._path}"
        return f"{self.finished} of {len(self._requests)} texts are finished{kept}"

    @contextlib.contextmanager
    def kept(self):
        """Saves what there is if what is inside ends early."""
        try:
            yield
        except BaseException as error:
            told = self.save_early()
            plain = isinstance(error, MemoryError | OSError) and not isinstance(
                error, BrokenPipeError
            )
            if told and plain:
                raise type(error)(f"{error} ({told})") from error
            raise

    def _entry(self, request: Request, one) -> dict:
        reason = "interrupted" if one.finish_reason == "running" else one.finish_reason
        return {
            "prompt": request.prompt,
            **({"sample": request.sample} if self._several else {}),
            "text": clean_text(self._tokenizer, one.tokens),
            "tokens": one.tokens,
            "finish_reason": reason,
            "rounds": one.rounds,
            "mean_accepted": one.mean_accepted,
        }


def clean_text(tokenizer, tokens: Sequence[int]) -> str:
    """The text of a reply, without the token that ended it and without control tokens."""
    return tokenizer.decode(without_stops(tokenizer, tokens), skip_special=True)


def without_stops(tokenizer, tokens: Sequence[int]) -> list[int]:
    """`tokens` but those that end a text."""
    return [token for token in tokens if token not in tokenizer.stop_ids]
