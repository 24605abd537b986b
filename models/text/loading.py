"""Loads a tokenizer from a checkpoint's folder."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from typing import Any

from ..common.fields import read_json
from .bpe import read_ranks
from .specials import SHOWN, SPECIAL_OFFSETS, SpecialTokens
from .template import ChatTemplate
from .tokenizer import Tokenizer

_SLOTS = 256  # ids reserved for special tokens after the ranks
_STOPS = ("[EOS]", "<|im_end|>", "[EOT]")
_MOST_TOKENS = 2**24
_TOKEN_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads `tiktoken.model` and what the other files of the folder add to it.

    Special tokens come from tokenizer_config.json's `added_tokens_decoder`, or stand at K2.6's
    offsets after the ranks; slots without a name are `<|reserved_token_{id}|>`. A byte-order mark
    at a file's start is no part of it.

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
    ranks = read_ranks(model)
    settings = _optional(folder, "tokenizer_config.json")
    config = _optional(folder, "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ValueError(
            f"{os.path.join(folder, 'config.json')}: text_config must be an object, not {text!r}"
        )
    vocab_size = text.get("vocab_size")
    if vocab_size is None:
        vocab_size = len(ranks) + _SLOTS
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
    return Tokenizer(
        ranks,
        specials,
        stop_ids=_stops(folder, config, text, specials),
        template=_template(folder, settings),
        token_variables=_token_variables(settings),
        source=folder,
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(
    folder: str, config: Mapping[str, Any], text: Mapping[str, Any], specials: SpecialTokens
) -> tuple[int, ...]:
    generation = _optional(folder, "generation_config.json")
    stops: list[int] = []
    for values in (config, text, generation):
        end = values.get("eos_token_id")
        stops.extend(end if isinstance(end, list) else [] if end is None else [end])
    for stop in stops:
        if not _is_whole(stop) or not 0 <= stop < specials.end:
            raise ValueError(
                f"{folder}: eos_token_id in config.json or generation_config.json must hold token ids "
                f"below {specials.end}, not {stop!r}"
            )
    stops.extend(specials[name] for name in _STOPS if name in specials)
    return tuple(dict.fromkeys(stops))


def _specials(folder: str, settings: Mapping[str, Any], first: int, end: int) -> SpecialTokens:
    declared = settings.get("added_tokens_decoder")
    if declared is None:
        offsets = SPECIAL_OFFSETS.items()
        named = {name: first + offset for name, offset in offsets if first + offset < end}
        return SpecialTokens(named, first, end, SHOWN)
    where = os.path.join(folder, "tokenizer_config.json")
    try:
        entries = [
            (int(number), token["content"], token.get("special", False))
            for number, token in declared.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: added_tokens_decoder cannot be read ({error!r})") from error
    counts = collections.Counter(name for _, name, _ in entries if isinstance(name, str))
    for number, name, special in entries:
        if not first <= number < end:
            raise ValueError(
                f"{where}: added_tokens_decoder gives {name!r} the id {number}, outside of {first} .. "
                f"{end - 1}, the ids after the ranks; tokenizer and config do not belong together"
            )
        if not isinstance(name, str) or not name or counts[name] > 1:
            raise ValueError(
                f"{where}: added_tokens_decoder names token {number} {name!r}; every special token "
                "needs a name of its own"
            )
        if not isinstance(special, bool):
            raise ValueError(f"{where}: special of {name!r} must be true or false, not {special!r}")
    named = {name: number for number, name, _ in entries}
    if len(named) > len(set(named.values())):
        raise ValueError(f"{where}: added_tokens_decoder names an id twice")
    unnamed = SpecialTokens({}, first, end, frozenset())
    for name, number in named.items():
        slot = unnamed.get(name, number)
        if slot != number and slot not in named.values():
            raise ValueError(
                f"{where}: added_tokens_decoder names token {number} {name!r}, the name of the slot {slot}"
            )
    return SpecialTokens(
        named, first, end, frozenset(n for _, n, special in entries if not special)
    )


def _template(folder: str, settings: Mapping[str, Any]) -> ChatTemplate | None:
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8-sig") as file:
            try:
                return ChatTemplate(file.read(), path)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    where = os.path.join(folder, "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ValueError(f"{where}: chat_template must be a string, not {template!r}")
    return ChatTemplate(template.removeprefix("\ufeff"), where)


def _token_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which templates read under those names."""
    variables = {}
    for name in _TOKEN_VARIABLES:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            variables[name] = content
    return variables


def _optional(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    return read_json(path)[0] if os.path.isfile(path) else {}
