"""What is printed and written of completions: clean text, every token, and no loss at an early end."""

import json
import pathlib

import pytest
from completions import Completion, Totals
from output import output_file, write
from prompts import Request
from report import Report
from streaming import Printer, _seldom

from ddtree_jax import DecodeConfig
from ddtree_jax.models import demo, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo.TARGET)


def _completion(tokens, reason="stop", rounds=2):
    return Completion(tokens, reason, rounds, len(tokens) / rounds)


def test_text_is_the_clean_reply_and_tokens_are_all(tokenizer, tmp_path):
    raw = "<think>plan</think>h\u00e4<|tool_call_begin|>f:0<|tool_call_end|>[PAD]<|im_end|>"
    ids = tokenizer.encode(raw, allow_special=True)
    report = Report(tmp_path / "a.json", tokenizer, [Request("x", [1])], "cpu")
    report.begin("ar", Totals())
    report.finish([_completion(ids)])
    report.save()
    (entry,) = json.loads((tmp_path / "a.json").read_text())["completions"]
    assert entry == {
        "prompt": "x",
        "text": "<think>plan</think>h\u00e4<|tool_call_begin|>f:0<|tool_call_end|>",
        "tokens": ids,
        "finish_reason": "stop",
        "rounds": 2,
        "mean_accepted": len(ids) / 2,
    }


def test_a_stop_token_that_is_no_special_one_ends_a_text_too(tokenizer, monkeypatch, capsys):
    newline = tokenizer.encode("\n")[0]
    monkeypatch.setattr(tokenizer, "stop_ids", (newline,))
    ids = [*tokenizer.encode("ab"), newline]
    report = Report(None, tokenizer, [Request("x", [1])], "cpu")
    report.finish([_completion(ids)])
    assert report.values()["completions"][0]["text"] == "ab"
    printer = Printer(tokenizer, ["x"])
    printer.push([_completion(ids)])
    printer.finish()
    assert capsys.readouterr().out == "xab\n\n"


def test_texts_are_printed_in_order_as_they_grow(tokenizer, capsys, rng):
    texts = ["one \u20ac two <think>", "short", "three\n  four"]
    ends = tokenizer.encode("[PAD]<|im_end|>", allow_special=True)
    ids = [[*tokenizer.encode(text, allow_special=True), *ends] for text in texts]
    capsys.readouterr()  # the seed
    printer = Printer(tokenizer, [f"{i}:\n\n" for i in range(3)])
    printed = [capsys.readouterr().out]
    shown = [0, 0, 0]
    while shown != [len(one) for one in ids]:
        shown = [
            min(n + int(rng.integers(0, 3)), len(one)) for n, one in zip(shown, ids, strict=True)
        ]
        printer.push([_completion(one[:n]) for n, one in zip(shown, ids, strict=True)])
        printed.append(capsys.readouterr().out)
        assert "".join(printed) == f"0:\n\n{texts[0]}"[: len("".join(printed))]
    printer.finish()
    printed.append(capsys.readouterr().out)
    assert "".join(printed) == "".join(f"{i}:\n\n{text}\n\n" for i, text in enumerate(texts))


def test_an_early_end_loses_nothing(tokenizer, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    requests = [Request(prompt, [1], sample) for prompt in "ab" for sample in range(2)]
    report = Report(path, tokenizer, requests, "cpu")
    report.begin("ddtree", Totals(tokens=6, seconds=2.0))
    assert report.save_early() == "" and path.read_text() == "old"
    whole, half = tokenizer.encode("whole"), tokenizer.encode("half")
    report.finish([_completion(whole, "length")])
    report.progress([_completion(half, "running"), _completion(whole, "stop")])
    with pytest.raises(MemoryError) as caught, report.kept():
        raise MemoryError("out of memory")
    told = f"2 of 4 texts are finished; all so far is in {path}"
    assert str(caught.value) == f"out of memory ({told})"
    written = json.loads(path.read_text())
    assert written["tokens_per_second"] == 3.0
    assert [
        (one["prompt"], one["sample"], one["text"], one["finish_reason"])
        for one in written["completions"]
    ] == [("a", 0, "whole", "length"), ("a", 1, "half", "interrupted"), ("b", 0, "whole", "stop")]
    path.unlink()
    with pytest.raises(BrokenPipeError), report.kept():
        raise BrokenPipeError
    assert json.loads(path.read_text()) == written


def test_a_long_run_is_written_now_and_then(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    report = Report(path, tokenizer, [Request("a", [1]), Request("b", [1])], "cpu")
    report.finish([_completion([5])])
    assert not path.exists()
    monkeypatch.setattr("report._SECONDS", -1.0)
    report.finish([_completion([6])])
    assert [one["tokens"] for one in json.loads(path.read_text())["completions"]] == [[5], [6]]


def test_the_last_line_says_when_drafts_were_rare():
    totals = Totals(rounds=40, undrafted_rounds=31)
    line = "; drafts gained too little: 31 of 40 rounds did without"
    assert _seldom(DecodeConfig(), totals) == _seldom(DecodeConfig(mode="chain"), totals) == line
    assert _seldom(DecodeConfig(mode="ar"), totals) == _seldom(DecodeConfig(budget=0), totals) == ""
    assert _seldom(DecodeConfig(mode="chain", budget=0), totals) == line
    assert _seldom(DecodeConfig(), Totals(rounds=40)) == _seldom(DecodeConfig(), Totals()) == ""
    assert _seldom(DecodeConfig(), Totals(rounds=40, undrafted_rounds=7)) == ""
    assert "8 of 40" in _seldom(DecodeConfig(), Totals(rounds=40, undrafted_rounds=8))


def test_a_report_replaces_the_file_behind_a_link_and_not_a_device(tmp_path):
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to(old)
    write("json", output_file("json", str(link)), "new")
    assert link.is_symlink() and old.read_text() == "new" and old.stat().st_mode & 0o777 == 0o640
    write("json", output_file("json", "/dev/null"), "new")
    assert pathlib.Path("/dev/null").is_char_device()
    assert sorted(tmp_path.iterdir()) == [link, old]


def test_a_file_that_cannot_be_written_names_its_flag(tmp_path):
    with pytest.raises(OSError, match="^--json /dev/full: No space left on device$"):
        write("json", output_file("json", "/dev/full"), "x")
    with pytest.raises(OSError, match="^--json /no/such/x: the folder /no/such does not exist$"):
        output_file("json", "/no/such/x")
    with pytest.raises(ValueError, match="^--json / is a folder"):
        output_file("json", "/")
