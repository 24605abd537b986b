"""Programs that are forked end as those that Python starts."""

import os
import subprocess
import sys

import programs
import pytest

_PROGRAM = """
import os, sys
import jax, primitive_checks
print(sys.argv, os.getcwd(), os.environ["WORD"], __name__, sys.stdin.read() == "", jax.device_count())
print("an error", file=sys.stderr)
if sys.argv[1] == "exit":
    sys.exit("one line")
if sys.argv[1] == "signal":
    os.kill(os.getpid(), 9)
if sys.argv[1] == "raise":
    raise KeyError("nothing")
if sys.argv[1] == "wait":
    sys.stdout.flush(), sys.stderr.flush()
    import time; time.sleep(3600)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    flags = "--xla_force_host_platform_device_count=3"
    return path, {"env": {"WORD": "\u00e4", "XLA_FLAGS": flags}, "cwd": tmp_path}


@pytest.mark.parametrize("end", ["well", "exit", "raise", "signal"])
def test_a_forked_program_is_a_started_one(program, end):
    path, options = program
    tests = os.path.dirname(programs.__file__)
    got = programs.run(path, end, paths=[tests], **options)
    options["env"] = {**os.environ, **options["env"], "JAX_PLATFORMS": "cpu", "PYTHONPATH": tests}
    command = [sys.executable, path, end]
    want = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )
    assert (got.returncode, got.stdout) == (want.returncode, want.stdout)
    assert got.returncode == {"well": 0, "exit": 1, "raise": 1, "signal": -9}[end]
    # A traceback starts with the forking; its end is the program's own.
    assert got.stderr.splitlines()[-1:] == want.stderr.splitlines()[-1:]
    if end != "raise":
        assert got.stderr == want.stderr


def test_a_program_that_does_not_end_is_killed(program):
    path, options = program
    options["paths"] = [os.path.dirname(programs.__file__)]
    # On a busy machine a program may be killed before it could say anything.
    for timeout in (3, 30, 300):
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            programs.run(path, "wait", timeout=timeout, **options)
        if caught.value.stderr:
            break
    assert "program.py" in caught.value.output and caught.value.stderr == "an error\n"
