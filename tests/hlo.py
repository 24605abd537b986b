"""What a compiled program does to its caches, and what it moves between devices."""

from __future__ import annotations

import re

import jax


def cache_copies(text: str, *caches, also: tuple[str, ...] = ()) -> list[str]:
    """Lines of compiled HLO that copy an array of a cache's shape, at once or in the background.

    Args:
      text: `compiled.as_text()`.
      caches: pytrees whose leaves have shapes, of arrays or of what stands for them.
      also: more operations that count, "transpose" for instance.

    Returns:
      The lines whose result is such an array, or a tuple that holds one.
    """
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(caches)}
    assert shapes, "no cache given"
    operations = "|".join(("copy", "copy-start", *also))
    results = re.compile(rf"^\s*(?:ROOT )?\S+ = (.*?) (?:{operations})\(")
    found = []
    for line in text.splitlines():
        result = results.match(line)
        if result and any(f"[{shape}]" in result[1] for shape in shapes):
            found.append(line)
    return found


def collectives(text: str) -> list[tuple[str, str]]:
    """Operations of compiled HLO that move data between devices, in the order of its lines.

    Args:
      text: `compiled.as_text()`.

    Returns:
      Each operation's name and its result's type without layouts, "f32[2,3]" for instance.
    """
    names = (
        "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    )
    # What runs in the background is counted where it starts.
    found = re.compile(rf"^\s*(?:ROOT )?\S+ = (.*?) ({names})(?:-start)?\(")
    matches = filter(None, map(found.match, text.splitlines()))
    return [(match[2], re.sub(r"\{[^}]*\}", "", match[1])) for match in matches]
