"""The plans of verify_attn's work on a GPU, run on the host for random problems."""

import pathlib
import shutil
import subprocess

import pytest
from limits import HANG_SECONDS

_HERE = pathlib.Path(__file__).parent


def _check(rng, tmp_path, source, compiler, problems):
    """Compiles a program and runs it with a fresh seed."""
    program = tmp_path / "program"
    command = [*compiler, "-std=c++17", f"-I{_HERE.parents[1]}", str(_HERE / source)]
    done = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    command = [str(program), str(rng.integers(2**31)), str(problems)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", ["plan_test.cu", "cluster_plan_test.cu"])
def test_all_work_is_done_once_and_merged(rng, tmp_path, source):
    _check(rng, tmp_path, source, ["nvcc", "-O1", "-arch=sm_80"], problems=2000)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernels_own_plan_on_emulated_warps(rng, tmp_path):
    # Nothing that the headers have of a GPU's own types and instructions is run.
    for header in ("cuda_bf16.h", "cuda_runtime.h"):
        (tmp_path / header).touch()
    compiler = ["g++", "-O2", "-Wno-unknown-pragmas", f"-I{tmp_path}"]
    _check(rng, tmp_path, "plan_on_warps_test.cc", compiler, problems=60)
