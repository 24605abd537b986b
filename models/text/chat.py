"""Chats: which messages are served, what the template gets of them, and what is whose in its text.

In a rendered chat the template's own `<|im_end|>` is a token and a user's is eight characters. Once
both are text nobody can tell them apart, so the template is rendered twice. The second time every
character of the chat's texts that could be part of a special token's name is replaced by a mark, one
for one: a private-use character that neither the chat nor the template holds. Names that are still
whole in that text are the template's. Filters that trim, join, slice or write JSON treat marks as
they treat letters, so no content can hide a name, nor complete one that the template or a neighbour
began. A template that looks at the letters themselves (`"</think>" in content`, `upper`, `urlencode`)
renders two texts that differ by more than marks; that is refused, as nobody can say whose a name is.

Not marked are the words that a template must recognise: roles, and the keys and types that it spells,
where they are words and no special token's name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .specials import SpecialTokens
from .template import ChatTemplate

_ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})
_OWN = ("messages", "tools", "thinking", "add_generation_prompt")
_DEPTH = 100  # JSON within JSON; a tool's schema has about ten


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as JSON's types, each content's text parts joined into one string.

    Raises:
      ValueError: something else than a list of messages with roles; a part that is no text, by its type.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, not {_kind(messages)}")
    checked = []
    for i, message in enumerate(messages):
        where = f"message {i}"
        if not isinstance(message, Mapping):
            raise ValueError(
                f'{where} must be {{"role": ..., "content": ...}}, not {_kind(message)}'
            )
        message = _plain(message, where)
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: role must be a string, not {_kind(message.get('role'))}")
        if "content" in message:
            message["content"] = _content(message["content"], where)
        checked.append(message)
    return checked


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools as JSON's types with sorted keys; None where there are none.

    Raises:
      ValueError: something else than a list of JSON objects.
    """
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list of declarations, not {_kind(tools)}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tool {i} must be a JSON object, not {_kind(tool)}")
    return _sorted(_plain(tools, "tools")) or None


def check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Further variables of a template as JSON's types.

    Raises:
      ValueError: a value that is none of them; the message names the variable.
    """
    return {name: _plain(value, f"variable {name!r}") for name, value in variables.items()}


def check_reads(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Any],
    extra: Mapping[str, Any],
):
    """Refuses what the template would pass over in silence.

    Args:
      template: the template.
      messages: of `check_messages`.
      asked: the values among `tools`, `thinking` and `add_generation_prompt` that are no defaults.
      extra: further variables of the caller's.

    Raises:
      ValueError: it names the variable, or the message's key.
    """
    for name in extra:
        if name not in template.variables:
            known = ", ".join(sorted(template.variables - {*_OWN, "tools_ts_str"})) or "no other"
            switch = "; the switch is thinking" if name == "enable_thinking" else ""
            raise ValueError(
                f"{template.where}: the chat template has no variable {name!r}{switch} "
                f"(beside {', '.join(_OWN)} it reads: {known})"
            )
    for name, value in asked.items():
        if name not in template.variables and not (
            name == "tools" and "tools_ts_str" in template.variables
        ):
            said = "tools" if name == "tools" else f"{name}={value}"
            raise ValueError(
                f"{template.where}: the chat template has no variable {name!r}; leave {said} out"
            )
    if "content" not in template.words:
        return  # it does not take messages apart by name
    known = template.words | {"role"}
    for i, message in enumerate(messages):
        for key, value in message.items():
            if key not in known and value not in (None, False, "", [], {}):
                raise ValueError(
                    f"message {i}: {template.where} does not read the key {key!r}; leave it out"
                )


class Marks:
    """Stands for the letters of others' texts, in variables of a template.

    Args:
      specials: the special tokens, whose letters are marked.
      template: whose words are left alone where only a key, a role or a type can be.
      variables: all that the template gets; no mark occurs in it.
    """

    def __init__(
        self, specials: SpecialTokens, template: ChatTemplate, variables: Mapping[str, Any]
    ):
        used = set(template.source) | set(json.dumps(variables, ensure_ascii=False))
        private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
        free = (chr(point) for point in private if chr(point) not in used)
        pairs = list(zip(sorted(specials.characters), free, strict=False))
        self._mark = str.maketrans(dict(pairs))
        self._unmark = str.maketrans({mark: letter for letter, mark in pairs})
        spelled = template.words | _ROLES
        self._words = {
            word for word in spelled if re.fullmatch(r"[\w-]+", word) and word not in specials
        }

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose every text is marked but the roles, types and keys that the template spells."""
        return [self._fields(message) for message in messages]

    def variable(self, value: Any) -> Any:
        """A tools' declaration or another variable, whose values the template may recognise as well."""
        if isinstance(value, str):
            return self._word(value)
        if isinstance(value, dict):
            return {self._word(key): self.variable(one) for key, one in value.items()}
        return [self.variable(one) for one in value] if isinstance(value, list) else value

    def text(self, text: str) -> str:
        """`text` with a mark for each letter."""
        return text.translate(self._mark)

    def take_off(self, text: str) -> str:
        """The text that `text` stands for."""
        return text.translate(self._unmark)

    def _fields(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {
                self._word(key): self._word(one)
                if key in ("role", "type") and isinstance(one, str)
                else self._fields(one)
                for key, one in value.items()
            }
        return [self._fields(one) for one in value] if isinstance(value, list) else value

    def _word(self, text: str) -> str:
        return text if text in self._words else self.text(text)


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be text or a list of parts, not {_kind(content)}")
    return "".join(_texts(content, where))


def _texts(parts: Sequence[Any], where: str) -> Iterator[str]:
    for i, part in enumerate(parts):
        if not isinstance(part, dict):
            raise ValueError(
                f'{where}: part {i} must be {{"type": "text", ...}}, not {_kind(part)}'
            )
        kind = part.get("type", "text")
        if kind != "text":
            raise ValueError(f"{where}: a part of type {kind!r} is not served; only text is")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: part {i} has no text, but {_kind(part.get('text'))}")
        for key in part:
            if key not in ("type", "text"):
                raise ValueError(f"{where}: a text part with {key!r} is not served; only text is")
        yield part["text"]


def _plain(value: Any, where: str, depth: int = _DEPTH) -> Any:
    """A copy in dicts and lists."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if depth == 0:
        raise ValueError(f"{where}: it nests deeper than {_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where}: a key must be a string, not {key!r}")
        return {key: _plain(one, where, depth - 1) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(one, where, depth - 1) for one in value]
    raise ValueError(f"{where}: a value must be one of JSON's, not {_kind(value)}")


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(one) for key, one in sorted(value.items())}
    return [_sorted(one) for one in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
