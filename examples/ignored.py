"""Flags that were given and do nothing beside the others."""

from __future__ import annotations

from collections.abc import Iterator

from absl import flags

_DRAFTING = ("drafter", "draft_window", "budget", "cost_curve")
_DECODING = (
    *("prompt", "prompt_file", "chat", "system", "thinking", "mode", "budget", "cost_curve"),
    *("max_new_tokens", "temperature", "top_p", "top_k", "seed", "n", "compare", "json"),
    *("batch_size", "draft_window"),
)


def ignored(values: flags.FlagValues) -> Iterator[str]:
    """A line for each set of flags of generate.py that were given and change nothing."""
    given = {name for name in values if values[name].present}
    sampled = values["temperature"].value > 0
    drafts = values["compare"].value or values["mode"].value != "ar"
    trees = values["compare"].value or values["mode"].value == "ddtree"
    rules = (
        ("with --dry_run", values["dry_run"].value, _DECODING),
        ("without --dry_run", not values["dry_run"].value, ("devices", "device_gb")),
        ("with --compare", values["compare"].value, ("mode",)),
        ("with --mode=ar", not drafts, _DRAFTING),
        ("with --mode=chain", drafts and not trees, ("budget",)),
        ("without --chat", not values["chat"].value, ("system", "thinking")),
        ("at --temperature 0", not sampled, ("top_p", "top_k", "seed")),
    )
    for when, applies, names in rules:
        idle = [f"--{name}" for name in names if name in given] if applies else []
        given -= set(names) if applies else set()
        if idle:
            yield f"{' and '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing {when}"
