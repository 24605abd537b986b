"""How programs end: Ctrl-C, a closed pipe, a full disk, wrong flags, warnings."""

import pathlib
import signal
import subprocess
import sys

import generate
import ignored
import pytest
from absl import flags
from absl.testing import flagsaver
from limits import HANG_SECONDS

_EXAMPLES = pathlib.Path(generate.__file__).parent

# A call into C that takes a minute and lets go of the interpreter, as a compilation does.
_PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import program
from absl import flags
import interrupt
from one_line_errors import show
_WHAT = flags.DEFINE_string("what", None, "")
def main():
    if _WHAT.value == "wait":
        interrupt.at_interrupt(lambda: "interrupted; two of three")
        show("ready")
        import hashlib
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    if _WHAT.value == "stuck":
        import time
        interrupt.at_interrupt(lambda: time.sleep(60))
        show("ready")
        time.sleep(60)
    if _WHAT.value == "write":
        for i in range(100_000):
            show("line\\n")
    if _WHAT.value == "forget":
        sys.stdout.write("not flushed")
    if _WHAT.value == "warn":
        import warnings
        for i in range(3):
            warnings.warn(f"number {{i}}\\nis odd")
    if _WHAT.value in ("memory", "value", "type"):
        raise {{"memory": MemoryError, "value": ValueError, "type": TypeError}}[_WHAT.value]("a\\nb")
program.run(main)
"""


@pytest.fixture
def start(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM.format(folder=str(_EXAMPLES)))

    def popen(*arguments, stdout=subprocess.PIPE):
        command = [sys.executable, str(path), *arguments]
        return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)

    return popen


def test_ctrl_c_ends_a_long_call_at_once(start):
    running = start("--what=wait")
    assert running.stdout.read(5) == "ready"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=HANG_SECONDS)
    assert (running.returncode, said) == (130, "interrupted; two of three\n")


def test_ctrl_c_twice_waits_for_nothing(start):
    running = start("--what=stuck")
    assert running.stdout.read(5) == "ready"
    while running.poll() is None:  # Signals that come close together may be one.
        running.send_signal(signal.SIGINT)
        try:
            running.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
    assert running.returncode == 130 and running.stderr.read() == ""


def test_a_closed_pipe_ends_quietly(start):
    running = start("--what=write")
    assert running.stdout.readline() == "line\n"
    running.stdout.close()
    assert running.stderr.read() == "" and running.wait(timeout=HANG_SECONDS) == 141


@pytest.mark.parametrize("what", ["--what=write", "--what=forget", "--help"])
def test_a_full_disk_is_one_line(start, what):
    with open("/dev/full", "w") as full:
        running = start(what, stdout=full)
        _, said = running.communicate(timeout=HANG_SECONDS)
    assert said == "error: the standard output: No space left on device\n"
    assert running.returncode == 1


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["--what=memory"], 1, "error: a b\n"),
        (["--what=value"], 1, "error: a b\n"),
        (["--what=type"], 1, "error: a b\n"),
        (["--what=warn"], 0, "note: number 0 is odd\n"),
        (["--whatt=x"], 1, "error: --whatt: no such flag. Did you mean: what?\n"),
        (["--nothing"], 1, "error: --nothing: no such flag\n"),
        (["--what"], 1, "error: Missing value for flag --what\n"),
        (["x"], 1, "error: unexpected argument 'x': every flag starts with --\n"),
        (["--help"], 0, ""),
    ],
)
def test_errors_notes_and_help(start, arguments, status, said):
    running = start(*arguments)
    out, err = running.communicate(timeout=HANG_SECONDS)
    assert (running.returncode, err) == (status, said)
    assert ("--what" in out) == (arguments == ["--help"])


@pytest.mark.parametrize(
    "arguments, lines",
    [
        ([], []),
        (["--mode=ar", "--budget=16"], ["--budget does nothing with --mode=ar"]),
        (
            ["--mode=ar", "--drafter=x", "--cost_curve=y", "--draft_window=4"],
            ["--drafter and --draft_window and --cost_curve do nothing with --mode=ar"],
        ),
        (["--mode=chain", "--budget=16"], ["--budget does nothing with --mode=chain"]),
        (["--mode=chain", "--cost_curve=y"], []),
        (["--mode=ar", "--budget=4", "--compare"], ["--mode does nothing with --compare"]),
        (["--nothinking"], ["--thinking does nothing without --chat"]),
        (["--chat", "--nothinking", "--system=x"], []),
        (["--seed=1", "--top_k=3"], ["--top_k and --seed do nothing at --temperature 0"]),
        (["--seed=1", "--top_k=3", "--temperature=0.5"], []),
        (["--devices=2"], ["--devices does nothing without --dry_run"]),
        (["--dry_run", "--prompt=x", "--devices=2"], ["--prompt does nothing with --dry_run"]),
    ],
)
def test_flags_that_do_nothing_are_named(arguments, lines):
    with flagsaver.flagsaver():
        flags.FLAGS(["generate.py", *arguments])
        assert list(ignored.ignored(flags.FLAGS)) == lines


def test_bad_flags_are_found_before_jax_is_imported(tmp_path):
    """As it is with a path of every kind that is not there, or not what it should be."""
    hidden = tmp_path / "jax"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise SystemExit('jax was imported')")
    cases = {
        "--checkpoint=/no/such": "--checkpoint /no/such: no such folder",
        "--drafter=/dev/null": "--drafter /dev/null: not a folder",
        "--prompt_file=/no/such": "--prompt_file /no/such: No such file or directory",
        "--cost_curve=/": "--cost_curve /: Is a directory",
        "--json=/": "--json / is a folder",
        "--top_p=nan": "--top_p must be above 0",
        "--temperature=1e39": "--temperature must be finite in float32",
        "--seed=4294967296": "--seed=4294967296:",
        "--n=2": "--n 2 draws the same text each time",
    }
    code = (
        f"import sys; sys.path[:0] = {[str(tmp_path), str(_EXAMPLES)]!r}\n"
        "import generate, program\n"
        "program.run(generate.main)"
    )
    running = {
        flag: subprocess.Popen(
            [sys.executable, "-c", code, flag],
            stderr=subprocess.PIPE,
            text=True,
        )
        for flag in cases
    }
    for flag, words in cases.items():
        _, said = running[flag].communicate(timeout=HANG_SECONDS)
        assert said.startswith(f"error: {words}") and said.count("\n") == 1, said
        assert running[flag].returncode == 1
