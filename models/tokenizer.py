"""Kimi's tokenizer: byte-pair ranks, Kimi's own split pattern, special tokens after the ranks.

Everything is read as data; the Python files that ship beside published checkpoints are not run.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .common.fields import read_json

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

_SLOTS = 256  # ids reserved for special tokens after the ranks
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
_STOPS = ("[EOS]", "<|im_end|>", "[EOT]")

# The regular expression engine behind tiktoken recurses on long matches: longer ones are cut.
_MAX_PIECE = 400_000
_LONG_RUN = re.compile(r"\s{1,25000}|\S{1,25000}")

_MOST_TOKENS = 2**24
# A template is a program: within the sandbox it can still divide by zero, run out of depth or of memory.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Tokenizer:
    """Text to token ids and back.

    Args:
      ranks: byte string to id, 0 .. len(ranks) - 1, every single byte among them.
      specials: name to id of the special tokens.
      vocab_size: ids that the model knows.
      stop_ids: ids that end a turn.
      chat_template: jinja source, or None.
      source: the folder, for messages.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        specials: Mapping[str, int],
        *,
        vocab_size: int,
        stop_ids: Sequence[int],
        chat_template: str | None = None,
        source: str = "tokenizer",
    ):
        self.special_ids = dict(specials)
        self.vocab_size = vocab_size
        self.stop_ids = tuple(stop_ids)
        self._chat_template = chat_template
        self._source = source
        self._special = frozenset(specials.values())
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self.special_ids
        )
        longest_first = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

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
        if not allow_special or not self.special_ids:
            return list(self._ordinary(text))
        ids: list[int] = []
        for i, piece in enumerate(self._split.split(text)):
            ids.extend([self.special_ids[piece]] if i % 2 else self._ordinary(piece))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: an id that has no token.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Bytes of `ids`."""
        ids = [int(i) for i in ids]
        if skip_special:
            ids = [i for i in ids if i not in self._special]
        try:
            return self._encoding.decode_bytes(ids)
        except (KeyError, OverflowError) as error:
            raise ValueError(f"{self._source}: no token has the id {error}") from error

    def stream_decoder(self, skip_special: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive piece by piece."""
        return StreamDecoder(self, skip_special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders messages by the checkpoint's template; encode them with `allow_special=True`.

        Args:
          messages: `{"role": ..., "content": ...}` each.
          thinking: whether the assistant's turn opens with its reasoning.
          tools: JSON declarations of tools. Templates that want them in another form (K2.5's
            TypeScript) take it through `variables`.
          add_generation_prompt: whether the assistant's turn is opened.
          variables: further variables of the template, `preserve_thinking` for instance.

        Raises:
          ValueError: the checkpoint has no template, or the template refuses the conversation.
        """
        if self._chat_template is None:
            raise ValueError(
                f"{self._source}: no chat_template.jinja; give the prompt as plain text"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self._chat_template).render(
                messages=messages,
                tools=tools,
                thinking=thinking,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"{self._source}: the chat template failed: {error}") from error

    def _ordinary(self, text: str) -> Iterator[int]:
        for start in range(0, len(text), _MAX_PIECE):
            for piece in _pieces(text[start : start + _MAX_PIECE]):
                yield from self._encoding.encode_ordinary(piece)


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


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads `tiktoken.model` and what the other files of the folder add to it.

    Special tokens come from tokenizer_config.json's `added_tokens_decoder`, or stand at K2.6's
    offsets after the ranks; slots without a name are `<|reserved_token_{id}|>`.

    Raises:
      FileNotFoundError: no such folder, or no tiktoken.model in it.
      ValueError: a file that cannot be read as what it is; the message names it.
    """
    folder = os.fspath(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{folder}: no such folder; give the one that holds config.json and tiktoken.model"
        )
    model = os.path.join(folder, "tiktoken.model")
    if not os.path.isfile(model):
        if os.path.isfile(os.path.join(folder, "tokenizer.json")):
            raise FileNotFoundError(
                f"{folder}: there is a tokenizer.json, which is not read, and no tiktoken.model; put the "
                "tiktoken.model of the published checkpoint beside it"
            )
        raise FileNotFoundError(f"{model}: no such file; a Kimi checkpoint folder holds one")
    ranks = _read_ranks(model)
    settings = _optional(folder, "tokenizer_config.json")
    config = _optional(folder, "config.json")
    generation = _optional(folder, "generation_config.json")
    text = config.get("text_config") or config
    vocab_size = text.get("vocab_size") or len(ranks) + _SLOTS
    if not _is_whole(vocab_size) or vocab_size > _MOST_TOKENS:
        raise ValueError(
            f"{os.path.join(folder, 'config.json')}: vocab_size must be a whole number up to "
            f"{_MOST_TOKENS}, not {vocab_size!r}"
        )
    if vocab_size < len(ranks):
        raise ValueError(
            f"{model}: {len(ranks)} ranks, but config.json's vocab_size is {vocab_size}; "
            "tokenizer and config do not belong together"
        )
    specials = _specials(folder, settings, len(ranks), vocab_size)
    ends = [config.get("eos_token_id"), text.get("eos_token_id"), generation.get("eos_token_id")]
    stops: list[int] = []
    for end in ends:
        stops.extend(end if isinstance(end, list) else [] if end is None else [end])
    for stop in stops:
        if not _is_whole(stop) or not 0 <= stop < vocab_size:
            raise ValueError(
                f"{folder}: eos_token_id in config.json or generation_config.json must hold token ids "
                f"below {vocab_size}, not {stop!r}"
            )
    stops.extend(specials[name] for name in _STOPS if name in specials)
    return Tokenizer(
        ranks,
        specials,
        vocab_size=vocab_size,
        stop_ids=tuple(dict.fromkeys(stops)),
        chat_template=_read_template(folder, settings),
        source=folder,
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_ranks(path: str) -> dict[bytes, int]:
    # tiktoken's own reader caches by path in a temporary folder and would miss a changed file.
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
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


def _specials(
    folder: str, settings: Mapping[str, Any], base: int, vocab_size: int
) -> dict[str, int]:
    declared = settings.get("added_tokens_decoder")
    if declared is None:
        named = {base + offset: name for name, offset in SPECIAL_OFFSETS.items()}
    else:
        try:
            named = {int(number): str(token["content"]) for number, token in declared.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            where = os.path.join(folder, "tokenizer_config.json")
            raise ValueError(f"{where}: added_tokens_decoder cannot be read ({error!r})") from error
        for number, token in named.items():
            if not base <= number < vocab_size:
                raise ValueError(
                    f"{os.path.join(folder, 'tokenizer_config.json')}: added_tokens_decoder gives "
                    f"{token!r} the id {number}, outside of {base} .. {vocab_size - 1}, the ids after "
                    "the ranks; tokenizer and config do not belong together"
                )
            if not token or token == "None" or list(named.values()).count(token) > 1:
                raise ValueError(
                    f"{os.path.join(folder, 'tokenizer_config.json')}: added_tokens_decoder names token "
                    f"{number} {token!r}; every special token needs a name of its own"
                )
    return {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(base, vocab_size)}


def _read_template(folder: str, settings: Mapping[str, Any]) -> str | None:
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            try:
                return file.read()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None


def _optional(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    return read_json(path)[0] if os.path.isfile(path) else {}


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


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str):
    raise jinja2.TemplateError(message)
