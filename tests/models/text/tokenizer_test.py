"""The tokenizer on a synthetic rank file of the published format."""

import base64
import json
import shutil

import pytest

from ddtree_jax.models import demo, load_tokenizer

MERGES = [
    "He",
    "ll",
    "Hell",
    "Hello",
    "Wo",
    "rl",
    "Worl",
    "World",
    "oW",
    "loW",
    "ab",
    "abc",
    " d",
    "on",
]
MERGES += [" don", "'t", " don't", "12", "123", "45", "345", "12345", "! ", "!!", "\n\n"]
TOKENS = [bytes([byte]) for byte in range(256)] + [token.encode() for token in MERGES]
TOKENS += ["你".encode()[:2], "你".encode(), "好".encode()[:2], "好".encode(), "你好".encode()]
TOKENS += [" 你好".encode()]
BASE = len(TOKENS)


@pytest.fixture
def folder(tmp_path):
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(TOKENS)]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    return tmp_path


def _split(tokenizer, text):
    return [tokenizer.decode_bytes([i]).decode() for i in tokenizer.encode(text)]


def test_kimi_pattern(folder):
    # Camel case parts, Han stands alone, contractions stay, digits go in threes.
    got = _split(load_tokenizer(folder), "HelloWorld 你好abc don't 12345")
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
def test_round_trip(folder, text):
    tokenizer = load_tokenizer(folder)
    for special in (False, True):
        ids = tokenizer.encode(text, allow_special=special)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_random_text_round_trips(folder, rng):
    tokenizer = load_tokenizer(folder)
    for _ in range(200):
        points = rng.integers(0, 0x11000, 30)
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_stream_never_breaks_a_character(folder):
    tokenizer = load_tokenizer(folder)
    text = "a🙂你好é"
    stream = tokenizer.stream_decoder()
    parts = [stream.push([i]) for i in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == text
    assert all("\ufffd" not in part for part in parts)
    assert parts[1:5] == ["", "", "", "🙂"]
    stream.push(tokenizer.encode("🙂")[:2])
    assert stream.finish() == "\ufffd"


def test_special_tokens_at_kimi_offsets(folder):
    tokenizer = load_tokenizer(folder)
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


def test_the_checkpoint_names_its_own_specials_and_stops(folder):
    added = {str(BASE + 1): {"content": "<stop>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    config = {"text_config": {"vocab_size": BASE + 4, "eos_token_id": BASE + 1}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_ids["<stop>"] == BASE + 1 and tokenizer.vocab_size == BASE + 4
    assert tokenizer.stop_ids == (BASE + 1,) and tokenizer.eos_id == BASE + 1


def test_long_input(folder):
    tokenizer = load_tokenizer(folder)
    for text in ("x" * 450_000, " " * 60_001, "你" * 30_000, ("ab" * 20_000 + " ") * 3):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_without_a_token(folder):
    tokenizer = load_tokenizer(folder)
    for bad in (tokenizer.vocab_size, -1, 2**40):
        with pytest.raises(ValueError, match="no token has the id"):
            tokenizer.decode([bad])


TEMPLATE = """{%- for m in messages -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is false %}<think></think>{% else %}<think>{% endif -%}{%- endif -%}"""


def test_chat_template(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    turn = [{"role": "user", "content": "你好 <b>"}]
    opened = "<|im_user|>user<|im_middle|>你好 <b><|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert tokenizer.apply_chat_template(turn) == opened + "<think>"
    assert tokenizer.apply_chat_template(turn, thinking=False) == opened + "<think></think>"
    with_tools = tokenizer.apply_chat_template(
        turn, tools=[{"n": "é<"}], add_generation_prompt=False
    )
    assert with_tools.endswith('<|im_end|>[{"n": "é<"}]')
    assert tokenizer.special_ids["<think>"] in tokenizer.encode(opened + "<think>", True)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{% for %}"]
)
def test_a_template_cannot_do_harm(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="chat template failed"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_no_template(folder):
    with pytest.raises(ValueError, match="no chat_template.jinja"):
        load_tokenizer(folder).apply_chat_template([])


@pytest.mark.parametrize(
    "text, message",
    [
        ("not base64!\n", "line 1 is not 'base64 rank'"),
        ("YQ== 1\n", r"ranks must be 0 \.\. 0"),
        ("YQ== 0\n", "single byte 0x00 has no rank"),
    ],
)
def test_bad_rank_files(tmp_path, text, message):
    with pytest.raises(FileNotFoundError, match="tiktoken.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_with_tokenizer_json_alone(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert load_tokenizer(folder).vocab_size == BASE + 256
    (folder / "tiktoken.model").unlink()
    message = (
        "there is a tokenizer.json, which is not read, and no tiktoken.model; put the tiktoken"
    )
    with pytest.raises(FileNotFoundError, match=message) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value)


def test_a_vocabulary_smaller_than_the_ranks(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10}))
    with pytest.raises(ValueError, match="do not belong together"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ 'a'.encode('x') }}", "{{ '{x}'.format() }}", "{{ '{:q}'.format(1) }}"],
)
def test_a_template_that_fails_is_one_sentence(tmp_path, template):
    folder = shutil.copytree(demo.TARGET, tmp_path / "target")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="the chat template failed"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("stop", ["x", 10**9, -1, 3.5, None, {}])
def test_stop_ids_are_tokens(tmp_path, stop):
    folder = shutil.copytree(demo.TARGET, tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    with pytest.raises(ValueError, match="eos_token_id"):
        load_tokenizer(folder)


@pytest.mark.parametrize("size", [[1], 10**12, 1.5])
def test_vocab_size_is_checked_before_it_is_filled(tmp_path, size):
    folder = shutil.copytree(demo.TARGET, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="vocab_size"):
        load_tokenizer(folder)


@pytest.mark.parametrize("number", [0, BASE - 1, BASE + 256, -1])
def test_a_special_token_lies_after_the_ranks_and_within_the_vocabulary(folder, number):
    added = {str(number): {"content": "<odd>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(ValueError, match=rf"'<odd>' the id {number}, outside of {BASE} \.\. "):
        load_tokenizer(folder)


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(ValueError, match="chat_template.jinja: not UTF-8 text"):
        load_tokenizer(folder)
