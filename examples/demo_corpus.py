"""The demo's text: the running interpreter's standard library, its tokenizer, and which modules are held out."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import sysconfig

import numpy as np
import tiktoken
import tokenizers

from ddtree_jax.models.text import PATTERN, SPECIAL_OFFSETS

# Tables of characters, generated files and text in other encodings teach nothing about Python.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data"}
_HELD_OUT_ONE_IN = 20


def modules() -> dict[str, str]:
    """Text of the standard library's modules by their path below it, sorted; only UTF-8 files."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found[relative.as_posix()] = text
    return found


def is_held_out(path: str) -> bool:
    """One module in twenty, by the SHA-256 of its path: the same on every machine."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % _HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str], ranks: int, path: pathlib.Path) -> tokenizers.Tokenizer:
    """Learns a byte-level BPE of `ranks` tokens and writes it as tiktoken lines, base64 token and rank."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=ranks, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    if trained.get_vocab_size() != ranks:
        raise ValueError(f"the text gave {trained.get_vocab_size()} tokens, expected {ranks}")
    to_byte = _byte_of_character()
    vocabulary = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    lines = []
    for token, rank in vocabulary:
        raw = bytes(to_byte[character] for character in token)
        lines.append(f"{base64.b64encode(raw).decode()} {rank}\n")
    path.write_text("".join(lines), encoding="ascii")
    return trained


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def read_tiktoken(path: pathlib.Path) -> tiktoken.Encoding:
    """The tokenizer that `train_tokenizer` wrote, without special tokens."""
    ranks = {}
    for line in path.read_text(encoding="ascii").splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding("demo", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def encode(texts: list[str], encoding: tiktoken.Encoding) -> np.ndarray:
    """u16[tokens] of the documents one after the other, each closed by [EOS]."""
    eos = encoding.n_vocab + SPECIAL_OFFSETS["[EOS]"]
    stream = []
    for document in encoding.encode_ordinary_batch(texts, num_threads=2):
        stream += document
        stream.append(eos)
    return np.asarray(stream, np.uint16)


def prompts(
    modules: dict[str, str], encoding: tiktoken.Encoding, count: int, tokens: int
) -> list[tuple[str, str]]:
    """`count` beginnings of classes and functions, with the lines before them, about `tokens` tokens each.

    Modules are visited in turn; test suites, which repeat themselves, are left out.
    """
    chosen: list[tuple[str, str]] = []
    places = {
        path: [i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class "))]
        for path, lines in ((path, text.splitlines(True)) for path, text in modules.items())
        if not any("test" in part for part in pathlib.PurePath(path).parts)
    }
    for turn in range(count):
        for path, starts in places.items():
            if len(chosen) == count:
                return chosen
            # Spread over the module: a quarter, an eighth, ... of the way.
            place = len(starts) // (turn + 2)
            if not starts or place + 1 >= len(starts):
                continue
            lines = modules[path].splitlines(True)
            text = "".join(lines[: starts[place] + 1])
            ids = encoding.encode_ordinary(text)
            if len(ids) < tokens:
                continue
            kept = encoding.decode(ids[-tokens:])
            kept = kept[kept.index("\n") + 1 :].lstrip("\n")
            if (path, kept) not in chosen:
                chosen.append((path, kept))
    return chosen
