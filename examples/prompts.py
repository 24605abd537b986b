"""Prompts from the command line and from files, and their tokens."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from one_line_errors import naming


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to make: its prompt as given, the tokens to continue, and which of the prompt's samples it is."""

    prompt: str
    ids: list[int]
    sample: int = 0


def read(texts: Sequence[str], file: str | None) -> list[str]:
    """The prompts: `texts`, then those of a text file, which is one, or of a .jsonl file, one a line.

    A byte-order mark at a file's beginning is taken off.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no UTF-8, a line of it is no JSON object with a "prompt", or it holds none.
    """
    if file is None:
        return list(texts)
    path = pathlib.Path(file)
    try:
        with naming("prompt_file", path):
            content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt_file {path}: not UTF-8 text ({error})") from error
    if path.suffix != ".jsonl":
        return [*texts, content]
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines and not texts:
        raise ValueError(f"--prompt_file {path}: holds no prompt")
    return [*texts, *(_json_prompt(f"{path}, line {number}", line) for number, line in lines)]


def requests(
    texts: Sequence[str],
    tokenizer,
    *,
    samples: int = 1,
    chat: bool = False,
    system: str | None = None,
    thinking: bool = True,
) -> list[Request]:
    """So many samples of each prompt, one prompt's beside each other.

    Args:
      texts: the prompts.
      tokenizer: of the target.
      samples: of each.
      chat: whether a prompt is a user's message, told to the model by its chat template.
      system: a message before it.
      thinking: whether the model's turn opens with its reasoning.

    Raises:
      ValueError: a prompt without a token, or one that the chat template refuses.
    """
    opening = [] if system is None else [{"role": "system", "content": system}]
    made = []
    for i, text in enumerate(texts):
        if chat:
            messages = [*opening, {"role": "user", "content": text}]
            ids = tokenizer.encode_chat(messages, thinking=thinking)
        else:
            ids = tokenizer.encode(text)
        if not ids:
            raise ValueError(f"prompt {i} is empty: give it some text")
        made += [Request(text, ids, sample) for sample in range(samples)]
    return made


def check_lengths(made: Sequence[Request], context: int, samples: int = 1):
    """Refuses what cannot be decoded before anything is, so that no finished text is lost to it.

    Raises:
      ValueError: a prompt of more tokens than the context holds.
    """
    for i, request in enumerate(made):
        if len(request.ids) > context:
            raise ValueError(
                f"prompt {i // samples} has {len(request.ids)} tokens, but the target's context holds "
                f"{context}: shorten it"
            )


def _json_prompt(where: str, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except RecursionError as error:
        raise ValueError(f"--prompt_file {where}: nested too deeply") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'--prompt_file {where}: not a JSON object with a "prompt"') from error
    if not isinstance(prompt, str):
        raise ValueError(f'--prompt_file {where}: "prompt" is not text')
    return prompt
