"""The tokenizer: text and chats to token ids, ids to text.

Everything is read as data; the Python files that ship beside published checkpoints are not run.
"""

from __future__ import annotations

import codecs
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import chat
from .bpe import BytePairs
from .specials import SpecialTokens
from .template import ChatTemplate
from .typescript import typescript


class Tokenizer:
    """Text to token ids and back.

    Args:
      ranks: byte string to id, 0 .. len(ranks) - 1, every single byte among them.
      specials: the special tokens, whose ids follow the ranks.
      stop_ids: ids that end a turn.
      template: the chat template, or None.
      token_variables: what a template knows as `bos_token`, `eos_token` and so on.
      source: the folder, for messages.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        specials: SpecialTokens,
        *,
        stop_ids: Sequence[int],
        template: ChatTemplate | None = None,
        token_variables: Mapping[str, str] | None = None,
        source: str = "tokenizer",
    ):
        self.special_ids = specials
        self.stop_ids = tuple(stop_ids)
        self._bytes = BytePairs(ranks)
        self._template = template
        self._token_variables = dict(token_variables or {})
        self._source = source

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows."""
        return self.special_ids.end

    @property
    def eos_id(self) -> int | None:
        """The first of `stop_ids`."""
        return self.stop_ids[0] if self.stop_ids else None

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; no begin or end token is added.

        Args:
          text: any string.
          allow_special: whether the names of special tokens in it become those tokens. Leave it off
            for text that others wrote.
        """
        if not allow_special:
            return list(self._bytes.encode(text))
        ids: list[int] = []
        for piece, special in self.special_ids.split(text):
            ids.extend(self._bytes.encode(piece) if special is None else [special])
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Args:
          ids: token ids.
          skip_special: whether control tokens are left out. Tags and marks of a reply
            (tokenizer_config.json says `"special": false` of `<think>` and of tool calls) stay;
            ids without a name of their own are left out.

        Raises:
          ValueError: an id that has no token.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Bytes of `ids`; the arguments are those of `decode`."""
        specials = self.special_ids
        ids = [int(one) for one in ids]
        for one in ids:
            if not 0 <= one < specials.end:
                raise ValueError(f"{self._source}: no token has the id {one}")
        pieces = []
        for is_special, run in itertools.groupby(ids, lambda one: one >= specials.first):
            if not is_special:
                pieces.append(self._bytes.decode(list(run)))
                continue
            kept = (one for one in run if not skip_special or specials.is_shown(one))
            pieces.extend(specials.name(one).encode() for one in kept)
        return b"".join(pieces)

    def stream_decoder(self, skip_special: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive piece by piece; `skip_special` as for `decode`."""
        return StreamDecoder(self, skip_special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of messages by the checkpoint's template; no text of theirs becomes a special token.

        Special tokens come from what the template itself writes. Between two of them its text and
        the messages' are one string to the byte pairs, as in the published tokenizer: the ids are
        those of `encode(apply_chat_template(...), allow_special=True)` wherever no special token's
        name in that text has a character of the messages'.

        Args:
          messages: `{"role": ..., "content": ...}` each, and further keys that the template reads
            (`reasoning_content`, `tool_calls`, `tool_call_id`, `name`). A content is a string, None,
            or a list of parts `{"type": "text", "text": ...}`, which are joined.
          tools: JSON declarations of tools. Their keys are sorted; a template that reads
            `tools_ts_str` gets them in TypeScript form, if that can say them.
          thinking: whether the assistant's turn opens with its reasoning.
          add_generation_prompt: whether the assistant's turn is opened.
          variables: further variables that the template reads, `preserve_thinking` for instance.

        Raises:
          ValueError: the checkpoint has no template; the template does not read a variable, a
            message's key or an argument; a part that is no text; the template fails or goes beyond a
            limit of time, memory or length; or it looks at the letters of texts (see `chat.py`).
        """
        template, context = self._context(
            messages, tools, thinking, add_generation_prompt, variables
        )
        marks = chat.Marks(self.special_ids, template, context)
        own = {"messages": marks.messages(context["messages"])}
        for name in ("tools", "tools_ts_str", *variables):
            if name in context:
                own[name] = marks.variable(context[name])
        plain, marked = template.render(context, {**context, **own})
        if marks.take_off(marked) != plain:
            raise ValueError(
                f"{template.where}: the chat template tests or changes letters of the messages' texts, so "
                "that theirs and its own special tokens cannot be told apart; encode the text of "
                "apply_chat_template instead"
            )
        ids: list[int] = []
        for piece, special in self.special_ids.split(marked):
            if special is None:
                ids.extend(self._bytes.encode(marks.take_off(piece)))
            else:
                ids.append(special)
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of messages by the checkpoint's template; arguments and errors as for `encode_chat`.

        In this text the special tokens of the template and their names in a message look alike:
        `encode_chat` tells them apart.
        """
        template, context = self._context(
            messages, tools, thinking, add_generation_prompt, variables
        )
        return template.render(context)[0]

    def _context(
        self, messages, tools, thinking, add_generation_prompt, variables
    ) -> tuple[ChatTemplate, dict[str, Any]]:
        """The template and its variables, checked."""
        template = self._template
        if template is None:
            raise ValueError(
                f"{self._source}: no chat_template.jinja; give the prompt as plain text"
            )
        messages = chat.check_messages(messages)
        tools = chat.check_tools(tools)
        extra = chat.check_variables(variables)
        asked = {
            "tools": tools,
            "thinking": thinking,
            "add_generation_prompt": add_generation_prompt,
        }
        defaults = {"tools": None, "thinking": True, "add_generation_prompt": True}
        asked_for = {name: asked[name] for name in asked if asked[name] != defaults[name]}
        chat.check_reads(template, messages, asked_for, extra)
        context = {**self._token_variables, "messages": messages, **asked}
        if tools and "tools_ts_str" in template.variables:
            try:
                context["tools_ts_str"] = typescript(tools)
            except ValueError as error:  # the published tokenizer goes on with JSON, too
                warnings.warn(
                    f"tools have no TypeScript form: {error}; the template gets JSON", stacklevel=3
                )
        return template, {**context, **extra}


class StreamDecoder:
    """Text of ids that arrive piece by piece; an incomplete character is held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids, self._skip_special))

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character, or nothing."""
        return self._utf8.decode(b"", final=True)
