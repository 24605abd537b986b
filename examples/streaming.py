"""Prints texts while they are made."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable

from one_line_errors import show
from report import without_stops
from runner import Runner
from sizes import even_batches

# Rounds between two looks at the text. A look costs a dispatch; four rounds are a line or so.
_ROUNDS_PER_CALL = 4
_WORTH_SAYING = 0.2  # of the rounds; a few pauses are part of every text


def stream(
    target, drafter, tokenizer, config, requests, *, batch_size, chat, report, compiling, describe
):
    """Prints each completion as its rounds finish, then one line of figures.

    Args:
      target, drafter, tokenizer, config: as `ddtree_decode` takes them.
      requests: what to decode.
      batch_size: how many of them at once, at most.
      chat: whether a reply stands apart from its prompt, by an empty line; else it continues its line.
      report: told of all that happens.
      compiling: as `Runner` takes it.
      describe: of the device, for the figures.
    """
    runner = Runner(target, drafter, config, _ROUNDS_PER_CALL, compiling)
    report.begin(config.mode, runner.totals)
    slices = list(even_batches(len(requests), batch_size))
    # One program for all batches: another one takes longer to compile than wide rows take to leave empty.
    runner.prepare(
        max(part.stop - part.start for part in slices),
        max(len(request.ids) for request in requests),
    )
    for part in slices:
        batch = requests[part]
        printer = Printer(tokenizer, [one.prompt + ("\n\n" if chat else "") for one in batch])
        completions = runner.run(
            [one.ids for one in batch],
            [one.sample for one in batch],
            functools.partial(_progress, report, printer),
            first=part.start,
        )
        report.finish(completions)
        printer.finish()
        for i, one in enumerate(completions, part.start):
            if one.finish_reason == "numerical":
                warning = f"warning: prompt {i}: the target's logits were not finite"
                print(warning, file=sys.stderr, flush=True)
    totals = runner.totals
    show(
        f"{totals.tokens_per_second:.1f} tokens/s, {totals.rounds} rounds, {totals.mean_accepted:.2f} tokens "
        f"accepted a round, {config.mode} on {describe}{_seldom(config, totals)}\n"
    )


class Printer:
    """Streams a batch's texts in order: each is held back until those before it are done.

    Args:
      tokenizer: whose control tokens are left out.
      openings: what stands in front of each text.
    """

    def __init__(self, tokenizer, openings):
        self._tokenizer = tokenizer
        self._decoders = [tokenizer.stream_decoder(skip_special=True) for _ in openings]
        self._held = list(openings)
        self._seen = [0] * len(self._held)
        self._current = 0
        self._show()

    def push(self, completions):
        """Prints what the completions, all of the batch, have grown by."""
        for i, one in enumerate(completions):
            new = without_stops(self._tokenizer, one.tokens[self._seen[i] :])
            self._seen[i] = len(one.tokens)
            self._held[i] += self._decoders[i].push(new)
        self._show()

    def finish(self):
        """Prints the rest of all of them."""
        while self._current < len(self._held):
            self._held[self._current] += self._decoders[self._current].finish()
            self._show()
            show("\n\n")
            self._current += 1

    def _show(self):
        show(self._held[self._current])
        self._held[self._current] = ""


def said_compiling(kept_in: str | None, prompts: int, columns: int):
    """A line of its own on stderr where a compilation takes longer than to find the program where it is kept."""
    kept = f"; the next start finds the program in {kept_in}" if kept_in else ""
    many = "a prompt" if prompts == 1 else f"{prompts} prompts"
    line = f"compiling for {many} of up to {columns} tokens{kept} ..."
    return _said_if_long(lambda: print(line, file=sys.stderr, flush=True))


@contextlib.contextmanager
def _said_if_long(say: Callable[[], None], seconds: float = 1.0):
    """Calls `say` when what is inside has lasted so long."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _progress(report, printer, completions):
    report.progress(completions)
    printer.push(completions)


def _seldom(config, totals) -> str:
    """That requests drafted rarely, if they did because drafts gained nothing."""
    drafts = config.mode == "chain" or (config.mode == "ddtree" and config.budget > 0)
    if not drafts or totals.undrafted_rounds < max(1, totals.rounds * _WORTH_SAYING):
        return ""
    return f"; drafts gained too little: {totals.undrafted_rounds} of {totals.rounds} rounds did without"
