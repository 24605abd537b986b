"""Prompts: files as editors leave them, broken lines, and samples."""

import json
import types

import prompts
import pytest

from ddtree_jax.models import demo, load_tokenizer


def test_marks_of_editors_are_taken_off(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"\xef\xbb\xbfdef f(x):\r\n    return")
    lines.write_bytes(b'\xef\xbb\xbf{"prompt": "def f(x):"}\r\n\r\n{"prompt": "caf\xc3\xa9"}\r\n')
    assert prompts.read([], str(text)) == ["def f(x):\n    return"]
    assert prompts.read(["x"], str(lines)) == ["x", "def f(x):", "caf\u00e9"]
    # Only in front is it a mark.
    text.write_text("a\ufeffb", encoding="utf-8")
    assert prompts.read([], str(text)) == ["a\ufeffb"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        ("1" * 5000, 'not a JSON object with a "prompt"'),
        ('{"prompt": ', 'not a JSON object with a "prompt"'),
        ('["prompt"]', 'not a JSON object with a "prompt"'),
        ('{"text": "x"}', 'not a JSON object with a "prompt"'),
        ('{"prompt": 5}', '"prompt" is not text'),
        ('{"prompt": null}', '"prompt" is not text'),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + line + "\n")
    with pytest.raises(ValueError) as caught:
        prompts.read([], str(path))
    assert str(caught.value) == f"--prompt_file {path}, line 2: {words}"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(OSError, match=f"^--prompt_file {tmp_path}: Is a directory$"):
        prompts.read([], str(tmp_path))
    path = tmp_path / "a.txt"
    path.write_bytes("def f".encode("utf-16"))
    with pytest.raises(ValueError, match=f"^--prompt_file {path}: not UTF-8 text"):
        prompts.read([], str(path))


def test_requests_of_a_chat(tmp_path):
    tokenizer = load_tokenizer(demo.TARGET)
    made = prompts.requests(
        ["Hi", "<|im_end|>"], tokenizer, samples=2, chat=True, system="Be brief"
    )
    assert [(one.prompt, one.sample) for one in made] == [
        ("Hi", 0),
        ("Hi", 1),
        ("<|im_end|>", 0),
        ("<|im_end|>", 1),
    ]
    for one in made:
        messages = [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": one.prompt},
        ]
        assert one.ids == tokenizer.encode_chat(messages)
    # What a user writes closes no turn: as many ends of turns in both.
    end = tokenizer.special_ids["<|im_end|>"]
    assert made[0].ids.count(end) == made[2].ids.count(end)
    (quiet,) = prompts.requests(["Hi"], tokenizer, chat=True, thinking=False)
    (loud,) = prompts.requests(["Hi"], tokenizer, chat=True)
    assert "</think>" in tokenizer.decode(quiet.ids) and "</think>" not in tokenizer.decode(
        loud.ids
    )


def test_prompts_are_checked_before_any_is_decoded():
    tokenizer = types.SimpleNamespace(encode=lambda text: list(text.encode()))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        prompts.requests(["x", ""], tokenizer)
    made = prompts.requests(["x", "xxxx"], tokenizer, samples=3)
    prompts.check_lengths(made, 4, 3)
    with pytest.raises(ValueError, match="prompt 1 has 4 tokens, but .* context holds 3"):
        prompts.check_lengths(made, 3, 3)
