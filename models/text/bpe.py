"""Kimi's byte-pair ranks and its own split pattern, for text without special tokens."""

from __future__ import annotations

import base64
import codecs
import re
from collections.abc import Iterator, Mapping

import tiktoken

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Kimi's split: Han runs, words with an optional contraction, 1-3 digits, punctuation, whitespace.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# The regular expression engine behind tiktoken recurses on long matches: longer ones are cut.
_MAX_PIECE = 400_000
_LONG_RUN = re.compile(r"\s{1,25000}|\S{1,25000}")


class BytePairs:
    """The ranks as an encoding.

    Args:
      ranks: byte string to id, 0 .. len(ranks) - 1, every single byte among them.
    """

    def __init__(self, ranks: Mapping[bytes, int]):
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )

    def encode(self, text: str) -> Iterator[int]:
        """Token ids of `text`."""
        for start in range(0, len(text), _MAX_PIECE):
            for piece in _pieces(text[start : start + _MAX_PIECE]):
                yield from self._encoding.encode_ordinary(piece)

    def decode(self, ids: list[int]) -> bytes:
        """Bytes of `ids`, each of which has a rank."""
        return self._encoding.decode_bytes(ids)


def read_ranks(path: str) -> dict[bytes, int]:
    """Reads a `tiktoken.model`: a base64 token and its rank a line.

    Raises:
      ValueError: the file is something else; the message names it.
    """
    # tiktoken's own reader caches by path in a temporary folder and would miss a changed file.
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is not 'base64 rank' ({error})") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks must be 0 .. {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{path}: the single byte {missing[0]:#04x} has no rank")
    return ranks


def _pieces(text: str) -> Iterator[str]:
    """`text` cut so that no run of blanks or of other characters is longer than 25,000."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        at = run.start()
        # Two neighbours of one kind: the first was cut for length.
        if at > start and text[at - 1].isspace() == text[at].isspace():
            yield text[start:at]
            start = at
    if start < len(text):
        yield text[start:]
