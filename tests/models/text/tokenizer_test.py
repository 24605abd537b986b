"""Text to ids and back, on a synthetic rank file of the published format."""

import time

import numpy as np
import pytest
import tiktoken
import tokenizer_folder
from tokenizer_folder import BASE, TOKENS

from ddtree_jax.models import load_tokenizer
from ddtree_jax.models.text import PATTERN, SHOWN, SPECIAL_OFFSETS
from ddtree_jax.models.text.specials import SpecialTokens


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(tokenizer_folder.write(tmp_path))


def test_kimi_pattern(tokenizer):
    # Camel case parts, Han stands alone, contractions stay, digits go in threes.
    ids = tokenizer.encode("HelloWorld 你好abc don't 12345")
    got = [tokenizer.decode_bytes([i]).decode() for i in ids]
    assert got == ["Hello", "World", " ", "你好", "abc", " don't", " ", "123", "45"]


TEXTS = [
    "",
    "你好",
    "a\r\n\r\n  b \t",
    "naïve café",
    "🙂👩‍👩‍👧‍👦🇫🇷",
    "[EOS]<think>",
    "\x00\x7f\ufffd",
    "ÅßЖ1٣४½",
    " " * 40,
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    for special in (False, True):
        ids = tokenizer.encode(text, allow_special=special)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_random_text_round_trips(tokenizer, rng):
    for _ in range(200):
        points = rng.integers(0, 0x11000, 30)
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_text_with_specials_as_tiktoken_encodes_it(tokenizer, rng):
    # tiktoken gets every name, reserved ones too, as the published tokenizer gives them to it.
    oracle = tiktoken.Encoding(
        "oracle",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(TOKENS)},
        special_tokens=dict(tokenizer.special_ids),
    )
    parts = [*SPECIAL_OFFSETS, "<|im_", "end|>", "[", "EOS]", "user", " ", "\n", "Hello", "|>", "<"]
    parts += [f"<|reserved_token_{BASE + n}|>" for n in (0, 2, 5, 25, 253, 255, 256, 10**6)]
    parts += [f"<|reserved_token_0{BASE + 5}|>", "<|reserved_token_<think>", "<|reserved_token_٣|>"]
    for _ in range(300):
        text = "".join(parts[i] for i in rng.integers(0, len(parts), 12))
        want = oracle.encode(text, allowed_special="all")
        assert tokenizer.encode(text, allow_special=True) == want
        assert tokenizer.encode(text) == oracle.encode_ordinary(text)
        assert tokenizer.decode(want) == text


def test_stream_never_breaks_a_character(tokenizer):
    text = "a🙂你好é"
    stream = tokenizer.stream_decoder()
    parts = [stream.push([i]) for i in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == text
    assert all("\ufffd" not in part for part in parts)
    assert parts[1:5] == ["", "", "", "🙂"]
    stream.push(tokenizer.encode("🙂")[:2])
    assert stream.finish() == "\ufffd"


def test_special_tokens_at_kimi_offsets(tokenizer):
    assert tokenizer.vocab_size == BASE + 256 and len(tokenizer.special_ids) == 256
    named = {
        "[BOS]": 0,
        "<|im_end|>": 2,
        "<|im_middle|>": 17,
        "<think>": 22,
        "[UNK]": 254,
        "[PAD]": 255,
    }
    for name, offset in named.items():
        assert tokenizer.special_ids[name] == BASE + offset
        assert tokenizer.encode(name, allow_special=True) == [BASE + offset]
        assert len(tokenizer.encode(name)) > 1
    assert tokenizer.special_ids[f"<|reserved_token_{BASE + 5}|>"] == BASE + 5
    assert set(tokenizer.stop_ids) == {BASE + 1, BASE + 2, BASE + 9}
    ids = tokenizer.encode("ab<|im_end|>Hello[EOS]", allow_special=True)
    assert BASE + 2 in ids and ids[-1] == BASE + 1
    assert tokenizer.decode(ids, skip_special=True) == "abHello"


REPLY = (
    "<think>plan</think>hi<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)


def test_a_reply_keeps_its_tags_and_loses_control_tokens(tokenizer):
    raw = f"[BOS]{REPLY}<|reserved_token_{BASE + 5}|><|im_end|>[EOT]"
    ids = tokenizer.encode(raw, allow_special=True)
    assert tokenizer.decode(ids) == raw
    assert tokenizer.decode(ids, skip_special=True) == REPLY
    stream = tokenizer.stream_decoder(skip_special=True)
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == REPLY


def test_what_a_reply_keeps_is_what_published_settings_keep():
    marks = {f"<|tool_call{mark}|>" for mark in ("s_section_begin", "s_section_end", "_begin")}
    marks |= {"<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>"}
    assert SHOWN == marks and SHOWN < set(SPECIAL_OFFSETS)


def test_long_input(tokenizer):
    for text in ("x" * 450_000, " " * 60_001, "你" * 30_000, ("ab" * 20_000 + " ") * 3):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_without_a_token(tokenizer):
    for bad in (tokenizer.vocab_size, -1, 2**40):
        for skip in (False, True):
            with pytest.raises(ValueError, match=f"no token has the id .*{bad}"):
                tokenizer.decode([bad], skip_special=skip)
    assert tokenizer.decode(np.array([BASE + 2, 97], np.int32)) == "<|im_end|>a"


def test_reserved_names_are_made_on_demand():
    first, end = 1000, 2**24
    start = time.process_time()
    specials = SpecialTokens({"[EOS]": 1001}, first, end, frozenset())
    assert len(specials) == end - first
    assert specials["<|reserved_token_16777215|>"] == 2**24 - 1
    assert (
        specials.name(2**24 - 1) == "<|reserved_token_16777215|>" and specials.name(1001) == "[EOS]"
    )
    for name in (
        "<|reserved_token_1001|>",
        "<|reserved_token_999|>",
        "<|reserved_token_16777216|>",
    ):
        assert name not in specials
    text = "a[EOS]<|reserved_token_9|>[<|reserved_token_1000|>"
    assert list(specials.split(text)) == [
        ("a", None),
        ("[EOS]", 1001),
        ("<|reserved_token_9|>[", None),
        ("<|reserved_token_1000|>", 1000),
    ]
    # Sixteen million names would take more than ten seconds and a gigabyte.
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("<a><ab>", ["<a>", "<ab>"]),
        ("<ab", ["<ab"]),
        ("xyz", ["xyz"]),
        ("xyxyz", ["xy", "xyz"]),
        ("<|reserved_token_3|>!", ["<|reserved_token_3|>!"]),
        ("<|reserved_token_7|>!", ["<|reserved_token_7|>"]),
        ("<|reserved_token_8|>!", ["<|reserved_token_8|>!"]),
        ("<|reserved_token_9|>!", []),
    ],
)
def test_the_longest_name_is_taken(text, pieces):
    names = ["<a>", "<ab", "<ab>", "xy", "xyz", "<|reserved_token_3|>!", "<|reserved_token_8|>!"]
    specials = SpecialTokens({name: i for i, name in enumerate(names)}, 0, 9, frozenset())
    assert [piece for piece, special in specials.split(text) if special is not None] == pieces
    assert "".join(piece for piece, _ in specials.split(text)) == text
