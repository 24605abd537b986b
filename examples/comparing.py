"""Decodes in the three modes and prints the figures side by side."""

from __future__ import annotations

import dataclasses

from losslessness import judge
from one_line_errors import show
from runner import Runner
from sizes import even_batches


def compare(target, drafter, config, requests, *, batch_size, report, compiling, describe):
    """Prints a line of figures for each mode when it is done; the report gets them as the table "compare".

    Args:
      target, drafter, config: as `ddtree_decode` takes them; the config's mode does not matter.
      requests: what to decode.
      batch_size: how many of them at once, at most.
      report: told of all that happens; its completions are those of the last mode.
      compiling: as `Runner` takes it.
      describe: of the device, for the first line.
    """
    sized = "" if config.cost_curve is None else ", fewer where fewer pay"
    show(f"{len(requests)} prompts on {describe}, budget {config.budget}{sized}\n")
    show("mode    tokens/s  speed-up  rounds  accepted a round  same text as ar\n")
    rows, baseline, plain_rate = [], None, 0.0
    report.tables["compare"] = rows
    slices = list(even_batches(len(requests), batch_size))
    for mode in ("ar", "chain", "ddtree"):
        runner = Runner(
            target, drafter, dataclasses.replace(config, mode=mode), compiling=compiling
        )
        report.begin(mode, runner.totals)
        runner.prepare(
            max(part.stop - part.start for part in slices),
            max(len(request.ids) for request in requests),
        )
        completions = []
        for part in slices:
            batch = requests[part]
            done = runner.run(
                [one.ids for one in batch],
                [one.sample for one in batch],
                report.progress,
                first=part.start,
            )
            report.finish(done)
            completions += done
        if baseline is None:
            baseline, plain_rate = completions, runner.totals.tokens_per_second
        verdicts = [
            judge(target, request.ids, ar.tokens, one.tokens, target.dtype)
            for request, ar, one in zip(requests, baseline, completions, strict=True)
        ]
        row = _row(mode, runner.totals, plain_rate, verdicts)
        rows.append(row)
        show(_line(row, len(requests)))


def _row(mode, totals, plain_rate, verdicts) -> dict:
    return {
        "mode": mode,
        "tokens_per_second": totals.tokens_per_second,
        "speed_up": totals.tokens_per_second / (plain_rate or 1),
        "rounds": totals.rounds,
        "undrafted_rounds": totals.undrafted_rounds,
        "mean_accepted": totals.mean_accepted,
        "same": verdicts.count("same"),
        "ties": verdicts.count("tie"),
        "expert_ties": verdicts.count("expert tie"),
        "different": verdicts.count("different"),
    }


def _line(row, count) -> str:
    ties = f", {row['ties']} ties" if row["ties"] else ""
    ties += f", {row['expert_ties']} ties of experts" if row["expert_ties"] else ""
    if row["mode"] != "ar" and row["undrafted_rounds"]:
        ties += f", {row['undrafted_rounds']} rounds without a draft"
    return (
        f"{row['mode']:<8}{row['tokens_per_second']:>8.1f}{row['speed_up']:>9.2f}x{row['rounds']:>8}"
        f"{row['mean_accepted']:>18.2f}  {row['same']} of {count}{ties}\n"
    )
