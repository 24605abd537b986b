"""The plans of verify_attn's work on a GPU, run on the host for random problems."""

import pathlib
import shutil
import subprocess

import pytest

_HERE = pathlib.Path(__file__).parent


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernels_own_plan_on_emulated_warps(rng, tmp_path):
    program = tmp_path / "plan_on_warps_test"
    for header in ("cuda_bf16.h", "cuda_runtime.h"):
        (tmp_path / header).touch()
    # What it has of a GPU's instructions and pragmas is never run.
    command = ["g++", "-std=c++17", "-O2", "-Wno-unknown-pragmas", f"-I{tmp_path}"]
    command += [f"-I{_HERE.parents[1]}", str(_HERE / "plan_on_warps_test.cc"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [str(program), str(rng.integers(2**31)), "60"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
