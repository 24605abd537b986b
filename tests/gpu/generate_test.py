"""examples/generate.py on a GPU, as it is called from a shell."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest
from limits import HANG_SECONDS

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def _generate(tmp_path, *flags):
    """The report of a run, and what it printed."""
    report = tmp_path / "report.json"
    command = [sys.executable, "generate.py", "--compilation_cache=", f"--json={report}", *flags]
    done = subprocess.run(
        command, cwd=_EXAMPLES, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text()), done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_modes_say_the_same(tmp_path, dtype):
    """But for ties, of experts too in bfloat16."""
    flags = ("--compare", f"--dtype={dtype}", "--batch_size=8", "--max_new_tokens=48")
    report, printed = _generate(tmp_path, *flags)
    print(printed)
    rows = {row["mode"]: row for row in report["compare"]}
    explained = [row["same"] + row["ties"] + row["expert_ties"] for row in rows.values()]
    assert explained == [32, 32, 32]
    assert dtype == "bfloat16" or not any(row["expert_ties"] for row in rows.values())
    assert min(row["same"] for row in rows.values()) >= (31 if dtype == "float32" else 16)
    assert rows["ar"]["mean_accepted"] == 1
    assert rows["ddtree"]["rounds"] < rows["chain"]["rounds"] < rows["ar"]["rounds"] / 2


def test_streamed_text_is_that_of_the_report(tmp_path):
    """Four rounds a call, each of which donates the state that the one before returned."""
    flags = ("--dtype=float32", "--max_new_tokens=40", "--prompt=import os\n")
    texts = {}
    for mode in ("ar", "ddtree"):
        report, streamed = _generate(tmp_path, *flags, f"--mode={mode}")
        (one,) = report["completions"]
        assert f"tokens accepted a round, {mode} on NVIDIA" in streamed
        assert one["finish_reason"] in ("length", "stop") and one["rounds"] > 4
        assert streamed.startswith("import os\n" + one["text"])
        texts[mode] = one["text"]
    assert texts["ar"] == texts["ddtree"]
