"""The command line: its text, its JSON, and one line for everything that can be wrong with its input."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import types
import warnings

import programs
import pytest
import quick_compile
from absl import flags as program_flags
from absl.testing import flagsaver
from limits import HANG_SECONDS
from safetensors.numpy import load_file, save_file

from ddtree_jax import DecodeConfig
from ddtree_jax.models import demo

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "generate.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


def _run(*arguments, cache="", xla_flags=quick_compile.XLA_FLAGS):
    flags = (f"--compilation_cache={cache}", *arguments)
    return programs.run(_SCRIPT, *flags, env={"XLA_FLAGS": xla_flags})


def _refused(*arguments, **options):
    """The one line of an invocation that must fail."""
    done = _run(*arguments, **options)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def _copy(source, folder):
    return pathlib.Path(shutil.copytree(source, folder / source.name))


def test_text_figures_and_json(tmp_path, cache):
    """Compiled as users have it, unlike the other tests' programs."""
    flags = os.environ.get("XLA_FLAGS", "")
    out = tmp_path / "out.json"
    prompt = "import os\n\ndef read(path):\n"
    done = _run(
        f"--prompt={prompt}",
        "--prompt=x = [",
        "--max_new_tokens=24",
        f"--json={out}",
        cache=cache,
        xla_flags=flags,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report) == {"mode", "device", "tokens_per_second", "completions"}
    assert report["mode"] == "ddtree" and report["tokens_per_second"] > 0
    first, second = report["completions"]
    assert set(first) == {
        "prompt",
        "text",
        "tokens",
        "finish_reason",
        "rounds",
        "mean_accepted",
    }
    assert first["prompt"] == prompt and second["prompt"] == "x = ["
    for one in (first, second):
        assert one["prompt"] + one["text"] in done.stdout
        if one["finish_reason"] == "length":
            assert len(one["tokens"]) == 24
        # All but the first token, which the prefill emits, come from rounds.
        assert one["mean_accepted"] == pytest.approx((len(one["tokens"]) - 1) / one["rounds"])
    last = done.stdout.strip().splitlines()[-1]
    for word in ("tokens/s", "rounds", "accepted", "ddtree", "cpu"):
        assert word in last

    # The cache's folder was empty.
    waits = f"compiling for a prompt of up to 64 tokens; the next start finds the program in {cache} ...\n"
    assert done.stderr == waits
    programs_kept = os.listdir(cache)

    # One batch of both prompts, and another mode, give the same text.
    again = tmp_path / "again.json"
    done = _run(
        f"--prompt={prompt}",
        "--prompt=x = [",
        "--max_new_tokens=24",
        "--batch_size=2",
        "--mode=ar",
        f"--json={again}",
        cache=cache,
        xla_flags=flags,
    )
    assert done.returncode == 0, done.stderr
    texts = [one["text"] for one in json.loads(again.read_text())["completions"]]
    assert texts == [first["text"], second["text"]]
    assert done.stderr in ("", waits.replace("a prompt", "2 prompts"))

    # What is no part of a program compiles none.
    assert programs_kept
    longer = _run(
        f"--prompt={prompt}", "--max_new_tokens=9", "--prompt=x", cache=cache, xla_flags=flags
    )
    assert longer.returncode == 0 and longer.stdout.startswith(prompt + first["text"][:3])


def test_compare_prints_the_three_modes(tmp_path, cache):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in demo.prompts()[:2]]
    prompts.write_text("\n".join(lines) + "\n")
    out = tmp_path / "out.json"
    done = _run(
        f"--prompt_file={prompts}", "--compare", "--max_new_tokens=16", f"--json={out}", cache=cache
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["compare"]
    assert [row["mode"] for row in rows] == ["ar", "chain", "ddtree"]
    for row in rows:
        assert row["different"] == 0 and row["same"] + row["ties"] == 2
        assert any(line.startswith(row["mode"]) for line in done.stdout.splitlines())
    assert rows[0]["mean_accepted"] == 1.0


def test_a_mesh_gives_the_same_text(tmp_path):
    """The prompts in two modes on one device and on two, as many as the demo has heads."""
    on_two = f"{quick_compile.XLA_FLAGS} --xla_force_host_platform_device_count=2"
    reports = []
    for flags in (["--mode=ar"], ["--mesh=2", "--budget=8"]):
        out = tmp_path / "out.json"
        done = _run(
            "--prompt=import os\n\ndef read(path):\n",
            "--prompt=x = [",
            "--max_new_tokens=16",
            f"--json={out}",
            *flags,
            xla_flags=on_two,
        )
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(out.read_text()))
    one, two = reports
    assert [c["tokens"] for c in two["completions"]] == [c["tokens"] for c in one["completions"]]
    assert one["device"] == "cpu" and two["device"] == "2 x cpu"


def test_a_mesh_that_does_not_divide_the_target_is_refused():
    on_three = "--xla_force_host_platform_device_count=3"
    line = _refused("--mesh=3", xla_flags=on_three)
    assert line.startswith("error: --mesh 3 does not divide the target's 2288 tokens of vocabulary")
    assert "2 heads" in line and line.endswith("give a divisor of 2")
    # None of these devices need be there to be counted with.
    assert "--mesh 3 does not divide" in _refused("--dry_run", "--mesh=3")


def test_a_cost_curve_verifies_what_pays(tmp_path, cache):
    """A curve gives way to nothing but the budget above it; the text is the same. A CPU's own budget is 4."""
    curve = tmp_path / "curve.json"
    costs = {"nodes": [1, 5, 9], "verify": [1.0, 1.6, 1.9], "draft": 0.9}
    curve.write_text(json.dumps({"cost_curve": costs}))
    texts, rounds = [], {}
    for name, flag in {
        "curve": f"--cost_curve={curve}",
        "fixed": "--budget=8",
        "default": "--seed=0",
        "four": "--budget=4",
        "ar": "--mode=ar",
    }.items():
        out = tmp_path / f"{name}.json"
        done = _run("--prompt=x = {", "--max_new_tokens=48", flag, f"--json={out}", cache=cache)
        assert done.returncode == 0, done.stderr
        (one,) = json.loads(out.read_text())["completions"]
        texts.append(one["text"])
        rounds[name] = one["rounds"]
    assert len(set(texts)) == 1
    # Fewer nodes and rounds without a draft take more rounds, though fewer than plain decoding.
    assert rounds["fixed"] < rounds["curve"] < rounds["ar"]
    assert rounds["default"] == rounds["four"] < rounds["ar"]


def test_a_chats_reply_stands_apart(cache, tmp_path):
    out = tmp_path / "out.json"
    # As many columns as above, whose program the cache has.
    flags = ("--chat", "--prompt=Hello", "--system=Be brief.", "--max_new_tokens=48")
    done = _run(*flags, "--nothinking", f"--json={out}", cache=cache)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(out.read_text())["completions"]
    assert len(one["tokens"]) <= 48 and one["prompt"] == "Hello"
    assert done.stdout.startswith(f"Hello\n\n{one['text']}\n\n")


def test_samples_of_a_prompt_differ_and_the_first_is_the_only_one_of_one(cache, tmp_path):
    texts = {}
    for number in (1, 3):
        out = tmp_path / f"{number}.json"
        flags = ("--temperature=1.2", "--seed=3", "--max_new_tokens=16", f"--json={out}")
        done = _run("--prompt=x =", "--prompt=import", f"--n={number}", *flags, cache=cache)
        assert done.returncode == 0, done.stderr
        texts[number] = json.loads(out.read_text())["completions"]
    assert [one["prompt"] for one in texts[3]] == ["x ="] * 3 + ["import"] * 3
    assert [one["sample"] for one in texts[3]] == [0, 1, 2] * 2
    assert not any("sample" in one for one in texts[1])
    assert [one["tokens"] for one in texts[3][::3]] == [one["tokens"] for one in texts[1]]
    assert len({tuple(one["tokens"]) for one in texts[3]}) == 6


def test_ctrl_c_while_decoding_keeps_what_is_finished(cache, tmp_path):
    out, file = tmp_path / "out.json", tmp_path / "many.jsonl"
    prompts = [f"def f{i}(x):" for i in range(200)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    command = [sys.executable, _SCRIPT, f"--compilation_cache={cache}", f"--prompt_file={file}"]
    running = subprocess.Popen(
        [*command, "--max_new_tokens=200", f"--json={out}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compile.XLA_FLAGS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in running.stdout:
        if line.startswith(prompts[2]):
            break
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 130
    *finished, last = json.loads(out.read_text())["completions"]
    assert len(finished) >= 2 and [one["prompt"] for one in finished] == prompts[: len(finished)]
    assert all(one["finish_reason"] in ("length", "stop") for one in finished)
    assert last["finish_reason"] in ("interrupted", "length", "stop")
    count = len(finished) + (last["finish_reason"] != "interrupted")
    wanted = f"interrupted; {count} of 200 texts are finished; all so far is in {out}"
    assert said.splitlines()[-1] == wanted


def test_a_cache_that_cannot_be_written_is_one_note(tmp_path):
    done = _run("--prompt=x", "--mode=ar", "--max_new_tokens=2", cache="/dev/null/x")
    assert done.returncode == 0
    note = "note: --compilation_cache /dev/null/x: Not a directory: programs are compiled anew at every start"
    first, *rest = done.stderr.splitlines()
    assert first == note and rest in ([], ["compiling for a prompt of up to 64 tokens ..."])


def test_a_cache_that_can_only_be_read_is_read(tmp_path, monkeypatch, capsys):
    import compiled_programs
    import jax

    def refuse(**options):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled_programs.tempfile, "TemporaryFile", refuse)
    with warnings.catch_warnings():
        try:
            assert compiled_programs.keep("cache", str(tmp_path)) is None
            assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
    told = "Permission denied: programs are taken from it, and new ones are lost at the end"
    assert capsys.readouterr().err == f"note: --cache {tmp_path}: {told}\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--checkpoint=/no/such", "--mode=ar", "--prompt=x"],
            ["error: --checkpoint /no/such: no such folder"],
        ),
        (["--drafter=/no/such/folder", "--prompt=x"], ["--drafter /no/such/folder"]),
        (["--prompt_file=/no/such/file"], ["/no/such/file"]),
        (["--prompt="], ["empty"]),
        (["--budget=-1"], ["budget", "-1"]),
        (["--budget=257"], ["budget", "256"]),
        (["--temperature=-1"], ["temperature"]),
        (["--top_p=0"], ["top_p"]),
        (["--mesh=2"], ["--mesh", "1 .. 1", "2"]),
        (["--mesh=0"], ["--mesh=0: 0 is not a positive integer"]),
        (["--json=/"], ["--json", "folder"]),
        (["--cost_curve=/"], ["--cost_curve /: Is a directory"]),
        (["--cost_curve=/no/such.json"], ["--cost_curve /no/such.json: No such file"]),
        (["--dry_run", "--mesh=2", "--devices=2"], ["--mesh", "--devices"]),
        (["--dry_run", "--mesh=0"], ["--mesh", "0"]),
        (["--json=/no/such/folder/x.json"], ["/no/such/folder"]),
        (["--batch_size=0"], ["--batch_size=0: 0 is not a positive integer"]),
        (["--max_new_tokens=0"], ["--max_new_tokens=0: 0 is not an integer in the range [1, "]),
        (["def f(x):"], ["'def f(x):'", "--prompt TEXT"]),
        ([f"--checkpoint={demo.TARGET}", "--prompt=x"], ["--drafter"]),
        ([f"--checkpoint={demo.TARGET}", "--mode=ar"], ["--prompt"]),
        (["--prompt=" + "word " * 5000], ["4096", "context"]),
    ],
)
def test_bad_flags(arguments, words):
    line = _refused(*arguments)
    for word in words:
        assert word in line


def test_damaged_checkpoints(tmp_path):
    target = _copy(demo.TARGET, tmp_path)
    weights = target / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in _refused(f"--checkpoint={target}", "--mode=ar", "--prompt=x")
    weights.unlink()
    assert "model.safetensors" in _refused(f"--checkpoint={target}", "--mode=ar", "--prompt=x")

    weights.write_bytes(whole)
    config = json.loads((target / "config.json").read_text())
    del config["text_config"]["kv_lora_rank"]
    (target / "config.json").write_text(json.dumps(config))
    line = _refused(f"--checkpoint={target}", "--mode=ar", "--prompt=x")
    assert "kv_lora_rank" in line and "config.json" in line

    drafter = _copy(demo.DRAFTER, tmp_path)
    tensors = load_file(drafter / "model.safetensors")
    tensors["stray.weight"] = tensors["norm.weight"]
    save_file(tensors, drafter / "model.safetensors")
    assert "stray.weight" in _refused(f"--drafter={drafter}", "--prompt=x")
    config = json.loads((drafter / "config.json").read_text())
    config["hidden_size"] = 128
    (drafter / "config.json").write_text(json.dumps(config))
    assert "128" in _refused(f"--drafter={drafter}", "--prompt=x")


def test_an_e4m3_cache(tmp_path):
    out = tmp_path / "out.json"
    flags = ("--max_new_tokens=24", "--prompt=def area(", "--budget=8")
    done = _run("--cache_dtype=float8_e4m3fn", *flags, "--compare", f"--json={out}")
    assert done.returncode == 0, done.stderr
    assert "(float32, cache float8_e4m3fn), budget 8" in done.stdout
    for row in json.loads(out.read_text())["compare"]:
        assert row["same"] + row["ties"] == 1 and row["different"] == 0, row
    message = "cache_dtype must be the model's float32 or float8_e4m3fn, not bfloat16"
    assert message in _refused("--dtype=float32", "--cache_dtype=bfloat16", "--prompt=x")


def test_dry_run_loads_nothing(tmp_path):
    for name, folder in (("target", demo.TARGET), ("drafter", demo.DRAFTER)):
        (tmp_path / name).mkdir()
        shutil.copyfile(pathlib.Path(folder) / "config.json", tmp_path / name / "config.json")
    folders = f"--checkpoint={tmp_path / 'target'}", f"--drafter={tmp_path / 'drafter'}"
    done = _run("--dry_run", *folders, "--devices=2", "--device_gb=4.2", "--param_dtype=float32")
    assert done.returncode == 0, done.stderr
    # Half of 46.8 MB each. Of the 177 MB left 64 requests' logits of 17 nodes take 10.0 MB; the rest is
    # 231 rows of 11,264 bytes each, 16 of them for the nodes.
    for words in ("46.8 MB", "2 x 4.2 GB: 23.4 MB", "batch 1 4,096", "batch 64 215", "--mesh"):
        assert words in done.stdout
    # Without its experts that is 43.8 MB, of which bfloat16 takes half.
    done = _run("--dry_run", *folders, "--devices=2", "--device_gb=4.2", "--param_dtype=stored")
    for words in ("(as stored)", "24.9 MB", "2 x 4.2 GB: 12.4 MB", "batch 64 230"):
        assert words in done.stdout
    # 4 layers of 576 numbers take a byte each and not four; the drafter's 2,048 bytes stay.
    small = _run("--dry_run", *folders, "--cache_dtype=float8_e4m3fn").stdout
    wide = _run("--dry_run", *folders).stdout
    assert "11,264 bytes a position of a request (latents in float32)" in wide
    assert "4,352 bytes a position of a request (latents in float8_e4m3fn)" in small
    on_mesh = _run("--dry_run", *folders, "--mesh=2", "--device_gb=4.2").stdout
    for words in ("2 x 4.2 GB: ", " of the target, the drafter and the caches on every device"):
        assert words in on_mesh
    assert "does not fit: 4.0 GB" in _run("--dry_run", "--device_gb=4").stdout
    assert "--devices" in _refused("--dry_run", "--devices=0")


@pytest.mark.parametrize(
    "program, flag",
    [("generate", "--dry_run"), ("draw_tree", "--help"), ("make_checkpoint", "--help")],
)
def test_programs_start_in_a_fresh_python(program, flag):
    """The other tests start them where JAX is imported already."""
    done = subprocess.run(
        [sys.executable, str(_SCRIPT.with_name(f"{program}.py")), flag],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "GB" in done.stdout or "--" in done.stdout


def test_json_is_whole_or_as_it_was(tmp_path):
    out = tmp_path / "out.json"
    _refused(f"--json={out}", "--prompt=")
    assert list(tmp_path.iterdir()) == []
    out.write_text("old")
    _refused(f"--json={out}", "--budget=-1")
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_a_context_shorter_than_the_text_is_told(capsys):
    import decode_flags
    import generate  # noqa: F401  for its flags

    target, tokenizer = types.SimpleNamespace(max_context=9), types.SimpleNamespace(stop_ids=[7])
    with flagsaver.flagsaver():
        program_flags.FLAGS(["generate.py", "--max_new_tokens=10", "--top_k=3"])
        config = decode_flags.config(target, tokenizer, on_cpu=True)
    assert config == DecodeConfig(budget=4, max_new_tokens=9, stop_tokens=(7,), top_k=3)
    note = "note: the context of 9 tokens ends a text before --max_new_tokens 10 does\n"
    assert capsys.readouterr().err == note


def test_the_readmes_set_up_is_what_ci_installs():
    root = _SCRIPT.parents[1]
    (tested,) = re.findall(
        r"pip install -v -e (\S+) && \S+/pytest", (root / "README.md").read_text()
    )
    assert f"install -q -e {tested}\n" in (root / ".ci" / "run").read_text()


@pytest.mark.parametrize("reads", [False, True])
def test_dtypes_by_device(monkeypatch, reads):
    """Weights stay as they are stored where float32 rows meet bfloat16 weights in a kernel of their own."""
    import dtypes

    monkeypatch.setattr(dtypes, "on_one_cpu", lambda: reads)
    held = "stored" if reads else None
    assert dtypes.dtypes(None) == {"dtype": "float32", "param_dtype": held}
    assert dtypes.dtypes("float32") == {"dtype": "float32", "param_dtype": held}
    assert dtypes.dtypes("bfloat16") == {"dtype": "bfloat16", "param_dtype": None}
    assert dtypes.dtypes(None, "float32") == {"dtype": "float32", "param_dtype": "float32"}
