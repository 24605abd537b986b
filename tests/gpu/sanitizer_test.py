"""All CUDA kernels under compute-sanitizer, and over poisoned memory, without JAX in between."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import time

import jax
import pytest
from limits import HANG_SECONDS

_ROOT = pathlib.Path(__file__).parents[2]
_CUDA_BIN = "/usr/local/cuda/bin"
_PATH = os.environ.get("PATH", "") + os.pathsep + _CUDA_BIN
# Hopper's own instructions are in sm_90a alone.
_HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
_ARCH = "-arch=sm_90a" if _HOPPER else "-arch=native"
_NVCC, _SANITIZER = shutil.which("nvcc", path=_PATH), shutil.which("compute-sanitizer", path=_PATH)

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
    pytest.mark.skipif(_NVCC is None, reason="needs nvcc"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    program = tmp_path_factory.mktemp("driver") / "kernel_driver"
    sources = [*(_ROOT / "ffi" / "cuda").rglob("*.cu"), _ROOT / "ffi" / "status.cc"]
    command = [_NVCC, "-std=c++17", "-O3", "-lineinfo", _ARCH, "--threads=0", f"-I{_ROOT}"]
    command += [str(pathlib.Path(__file__).parent / "kernel_driver.cu"), *map(str, sources)]
    done = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return str(program)


def test_results_do_not_depend_on_what_memory_held(driver):
    done = subprocess.run([driver], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(_SANITIZER is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(driver, tool):
    command = [_SANITIZER, "--tool", tool, "--error-exitcode=9", driver]
    # A fill would hide what was never written.
    command += ["uninitialised"] if tool == "initcheck" else []
    count = int(
        subprocess.run([driver, "count"], capture_output=True, text=True, check=True).stdout
    )
    assert count > 10

    def run(case):
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, str(case)], capture_output=True, text=True, timeout=HANG_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"case {case} took longer than {HANG_SECONDS} s"
        print(f"{tool}, case {case}: {time.perf_counter() - start:.0f} s")
        said = done.stdout + done.stderr
        clean = done.returncode == 0 and "all kernels ran" in said
        return None if clean else f"case {case}: {said[-4000:]}"

    # A tool needs a processor for most of its time.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        wrong = [said for said in pool.map(run, range(count)) if said]
    assert not wrong, "\n".join(wrong)
