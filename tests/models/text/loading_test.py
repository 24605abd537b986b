"""What a folder's files make of the tokenizer, and what is refused of them."""

import codecs
import json
import shutil
import time

import pytest
import tokenizer_folder
from tokenizer_folder import BASE

from ddtree_jax.models import KimiK26Config, demo, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    return tokenizer_folder.write(tmp_path)


@pytest.fixture
def demo_copy(tmp_path):
    names = ("chat_template.jinja", "config.json", "generation_config.json")
    for name in (*names, "tiktoken.model", "tokenizer_config.json"):
        shutil.copy(demo.TARGET / name, tmp_path)
    return tmp_path


def _declare(folder, tokens):
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))


def test_the_checkpoint_names_its_own_specials_and_stops(folder):
    _declare(folder, {str(BASE + 1): {"content": "<stop>", "special": True}})
    config = {"text_config": {"vocab_size": BASE + 4, "eos_token_id": BASE + 1}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_ids["<stop>"] == BASE + 1 and tokenizer.vocab_size == BASE + 4
    assert tokenizer.stop_ids == (BASE + 1,) and tokenizer.eos_id == BASE + 1


def test_the_checkpoint_says_what_a_reply_shows(folder):
    # A token that says nothing of it is none that transformers would skip.
    tokens = {
        str(BASE + 1): {"content": "<end>", "special": True},
        str(BASE + 2): {"content": "<plan>", "special": False},
        str(BASE + 3): {"content": "<note>"},
    }
    _declare(folder, tokens)
    tokenizer = load_tokenizer(folder)
    ids = [BASE + 2, *tokenizer.encode("ab"), BASE + 3, BASE + 1, BASE + 7]
    assert tokenizer.decode(ids, skip_special=True) == "<plan>ab<note>"
    assert tokenizer.decode(ids) == f"<plan>ab<note><end><|reserved_token_{BASE + 7}|>"


def test_a_vocabulary_that_ends_among_the_named_tokens(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": BASE + 10}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_ids["[EOT]"] == BASE + 9 == tokenizer.vocab_size - 1
    assert "<|im_system|>" not in tokenizer.special_ids and len(tokenizer.special_ids) == 10


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


@pytest.mark.parametrize("size", [10, 0, -1])
def test_a_vocabulary_smaller_than_the_ranks(folder, size):
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    with pytest.raises(ValueError, match="do not belong together"):
        load_tokenizer(folder)


@pytest.mark.parametrize("stop", ["x", 10**9, -1, 3.5, None, {}])
def test_stop_ids_are_tokens(demo_copy, stop):
    (demo_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    with pytest.raises(ValueError, match="eos_token_id"):
        load_tokenizer(demo_copy)


@pytest.mark.parametrize("size", [[1], 10**12, 1.5, True, "2288"])
def test_vocab_size_is_a_number_of_tokens(demo_copy, size):
    config = json.loads((demo_copy / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (demo_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json: vocab_size"):
        load_tokenizer(demo_copy)


@pytest.mark.parametrize("size", [2**18, 2**24])
def test_a_large_vocabulary_costs_what_the_files_hold(demo_copy, size):
    config = json.loads((demo_copy / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (demo_copy / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    tokenizer = load_tokenizer(demo_copy)
    assert tokenizer.vocab_size == size
    last = f"<|reserved_token_{size - 1}|>"
    assert tokenizer.encode(f"{last}<think>", allow_special=True) == [size - 1, 2054]
    assert tokenizer.decode([size - 1]) == last
    assert time.process_time() - start < 5  # it took half a minute to name them all


@pytest.mark.parametrize("text", [[1], "abc", 5, 1.5, None, [], "", 0, False])
def test_a_text_config_that_is_no_object(demo_copy, text):
    config = json.loads((demo_copy / "config.json").read_text())
    (demo_copy / "config.json").write_text(json.dumps({**config, "text_config": text}))
    for load in (load_tokenizer, KimiK26Config.from_json):
        with pytest.raises(ValueError, match="config.json: text_config must be an object") as error:
            load(demo_copy)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [0, BASE - 1, BASE + 256, -1])
def test_a_special_token_lies_after_the_ranks_and_within_the_vocabulary(folder, number):
    _declare(folder, {str(number): {"content": "<odd>", "special": True}})
    with pytest.raises(ValueError, match=rf"'<odd>' the id {number}, outside of {BASE} \.\. "):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({str(BASE): {"content": None}}, "needs a name of its own"),
        ({str(BASE): {"content": ""}}, "needs a name of its own"),
        ({str(BASE): {"content": ["x"]}}, "needs a name of its own"),
        ({str(BASE): {"content": "x"}, str(BASE + 1): {"content": "x"}}, "needs a name of its own"),
        ({str(BASE): {"content": "x"}, f"0{BASE}": {"content": "y"}}, "names an id twice"),
        ({str(BASE): {"content": "x", "special": "no"}}, "special of 'x' must be true or false"),
        ({str(BASE): {"content": f"<|reserved_token_{BASE + 1}|>"}}, f"the slot {BASE + 1}"),
        ({str(BASE): {}}, "cannot be read"),
        ({str(BASE): "x"}, "cannot be read"),
        ({"x": {"content": "x"}}, "cannot be read"),
        ([1], "cannot be read"),
    ],
)
def test_declarations_that_cannot_be_right(folder, tokens, message):
    _declare(folder, tokens)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(folder)
    assert str(folder / "tokenizer_config.json") in str(error.value)


def test_many_declared_tokens_are_read_at_once(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": BASE + 50_000}))
    _declare(folder, {str(BASE + i): {"content": f"<{i}>"} for i in range(50_000)})
    start = time.process_time()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<49999><50000>", True)[0] == BASE + 49_999
    assert time.process_time() - start < 15  # 50,000 x 50,000 comparisons would take minutes


FILES = ("chat_template.jinja", "config.json", "generation_config.json", "tiktoken.model")


@pytest.mark.parametrize("name", [*FILES, "tokenizer_config.json"])
def test_a_byte_order_mark_is_taken_off(demo_copy, name):
    path = demo_copy / name
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    marked, plain = load_tokenizer(demo_copy), load_tokenizer(demo.TARGET)
    messages = [{"role": "user", "content": "é"}]
    text = marked.apply_chat_template(messages)
    assert text == plain.apply_chat_template(messages) and text.startswith("<|im_user|>")
    assert marked.encode_chat(messages) == plain.encode_chat(messages)
    assert dict(marked.special_ids) == dict(plain.special_ids)
    configs = [KimiK26Config.from_json(folder) for folder in (demo_copy, demo.TARGET)]
    assert configs[0] == configs[1]
    assert marked.stop_ids == plain.stop_ids == (2033, 2034, 2041)


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(ValueError, match="chat_template.jinja: not UTF-8 text"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}{{ eos_token }}",
        "\ufeff{{ messages[0].content }}{{ eos_token }}",
        [
            {"name": "tool_use", "template": "{{ 1 }}"},
            {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
        ],
    ],
)
def test_a_template_in_tokenizer_config(folder, template):
    settings = {"chat_template": template, "eos_token": {"content": "[EOS]"}, "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "[EOS]"}]
    assert tokenizer.apply_chat_template(messages) == "[EOS][EOS]"
    # The checkpoint's own token is one; the same letters in a message are letters.
    assert tokenizer.encode_chat(messages) == [*b"[EOS]", BASE + 1]


def test_a_template_of_another_type_is_named(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template must be a string"):
        load_tokenizer(folder)


def test_no_template(folder):
    for call in (load_tokenizer(folder).apply_chat_template, load_tokenizer(folder).encode_chat):
        with pytest.raises(ValueError, match="no chat_template.jinja"):
            call([{"role": "user", "content": "x"}])
