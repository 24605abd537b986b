"""The project's Markdown pages, taken apart: fenced blocks, links, headings and code spans."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
      page: its path below the project's folder.
      line: number of the text's first line.
      language: the word after the fence; "" for none.
      text: what the fence holds.
    """

    page: str
    line: int
    language: str
    text: str


def is_log(page: str) -> bool:
    """A log says what was so on its day: its commands are not run, and its files may be gone."""
    return page.startswith("docs/log/")


@functools.cache
def _taken_apart(page: str) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    blocks, prose, block = [], [], None
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = re.match(r" *```(\w*)$", line)
        if block is None and fence:
            block = (number + 1, fence[1], [])
        elif block is not None and fence:
            assert not fence[1], f"{page}:{number}: a fence inside a block"
            blocks.append(Block(page, block[0], block[1], "\n".join(block[2]) + "\n"))
            block = None
        elif block is not None:
            block[2].append(line)
        elif re.match(r"    (python|\.venv/bin/python) ", line):  # an indented command
            blocks.append(Block(page, number, "sh", line.strip() + "\n"))
        else:
            assert "```" not in line, f"{page}:{number}: a fence that is not alone on its line"
            prose.append(line)
    assert block is None, f"{page}: the block of line {block[0]} has no end"
    return tuple(blocks), tuple(prose)


def blocks(page: str) -> tuple[Block, ...]:
    """The page's blocks of code, in order; an indented line that starts a program is one too."""
    return _taken_apart(page)[0]


def spans(page: str) -> list[str]:
    """The code spans of the page's prose; one may go over the end of a line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", _prose(page))]


def links(page: str) -> list[str]:
    """The targets of the page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "code", _prose(page)))


def _prose(page):
    return "\n".join(_taken_apart(page)[1])


@functools.cache
def anchors(page: str) -> frozenset[str]:
    """What a link may name after "#": each heading as GitHub writes it."""
    names, seen = set(), {}
    for heading in re.findall(r"^#+ +(.*?) *$", _prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = seen[name] = seen.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)
