"""Special tokens: the ids after the ranks, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

#: K2.6's named special tokens: name to offset from the first id after the ranks.
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
#: Those among them that K2.6's tokenizer_config.json marks `"special": false`: part of a reply's text.
SHOWN = frozenset(
    {
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<think>",
        "</think>",
    }
)

_RESERVED = "<|reserved_token_{}|>"
_RESERVED_NAME = re.compile(r"<\|reserved_token_(0|[1-9][0-9]{0,9})\|>")


class SpecialTokens(Mapping[str, int]):
    """Name to id of every special token; ids without a name of their own are `<|reserved_token_{id}|>`.

    Reserved names are made when they are asked for: the cost is that of the named tokens, whatever
    `end` is.

    Args:
      named: name to id, each id in `first .. end - 1`, no id twice.
      first: the first id after the ranks.
      end: ids that the model knows.
      shown: names that `decode(skip_special=True)` keeps.
    """

    def __init__(self, named: Mapping[str, int], first: int, end: int, shown: frozenset[str]):
        self.first = first
        self.end = end
        self._ids = dict(named)
        self._names = {number: name for name, number in named.items()}
        self._shown = frozenset(self._ids[name] for name in shown if name in self._ids)
        self._lengths = sorted({len(name) for name in self._ids}, reverse=True)
        begins = {name[:3] for name in (*self._ids, _RESERVED)}
        self._begins = re.compile("|".join(map(re.escape, sorted(begins))))

    def __getitem__(self, name: str) -> int:
        if name in self._ids:
            return self._ids[name]
        match = _RESERVED_NAME.fullmatch(name)
        if match is None or not self._is_reserved(int(match[1])):
            raise KeyError(name)
        return int(match[1])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return map(self.name, range(self.first, self.end))

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def characters(self) -> frozenset[str]:
        """Every character that a name may hold."""
        names = [*self._ids, _RESERVED.format("0123456789")] if len(self) else []
        return frozenset("".join(names))

    def name(self, number: int) -> str:
        """The name of the id `number`, which must lie in `first .. end - 1`."""
        return self._names.get(number) or _RESERVED.format(number)

    def is_shown(self, number: int) -> bool:
        """Whether a reader wants to see it: a tag or mark of a reply, no control token."""
        return number in self._shown

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """`text` in pieces: (a special token's name, its id) or (other text, None).

        Of names that begin at one character the longest is taken.
        """
        start = at = 0
        while begins := self._begins.search(text, at):
            at = begins.start()
            name = self._longest(text, at)
            if name is None:
                at += 1
                continue
            if at > start:
                yield text[start:at], None
            yield name, self[name]
            start = at = at + len(name)
        if start < len(text):
            yield text[start:], None

    def _longest(self, text: str, at: int) -> str | None:
        """The longest name that begins at `at`."""
        own = (text[at : at + length] for length in self._lengths)
        names = [next((name for name in own if name in self._ids), "")]
        if match := _RESERVED_NAME.match(text, at):
            names.append(match[0] if match[0] in self else "")
        return max(names, key=len) or None

    def _is_reserved(self, number: int) -> bool:
        return self.first <= number < self.end and number not in self._names
