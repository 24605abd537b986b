"""The plans of verify_attn's work on a GPU, compiled for the host and tried on random problems."""

import pathlib
import shutil
import subprocess

import pytest

_HERE = pathlib.Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.mark.parametrize("source", ["plan_test.cu", "cluster_plan_test.cu"])
def test_all_work_is_done_once_and_merged(rng, tmp_path, source):
    program = tmp_path / "plan_test"
    command = ["nvcc", "-std=c++17", "-O1", "-arch=sm_80", f"-I{_HERE.parents[1]}"]
    command += [str(_HERE / source)]
    done = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [str(program), str(rng.integers(2**31)), "2000"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
