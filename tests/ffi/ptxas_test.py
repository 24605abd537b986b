"""The CUDA kernels as ptxas sees them: no spills, and no more shared memory than a block may have on sm_120."""

import pathlib
import re
import shutil
import subprocess

import pytest

_FFI = pathlib.Path(__file__).parents[2] / "ffi"
_SHARED_LIMIT = 99 * 1024  # bytes a block on sm_120
# Of the thread that plans the Hopper kernel's tiles, once a tile: it has but 24 registers.
_SPILL_BOUND = {"verify_attn_hopper.cu": 32}

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def _functions(report):
    """(name, spill bytes, shared bytes) of each function in a `ptxas -v` report."""
    blocks = re.split(r"Compiling entry function '", report)[1:]
    for block in blocks:
        name = block.split("'")[0]
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", block)))
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", block)))
        yield name, spills, shared


@pytest.mark.parametrize(
    ("source", "arch"),
    [
        *((path.name, "120") for path in sorted((_FFI / "cuda").glob("*.cu"))),
        ("draft_topk.cu", "90a"),
        ("expert_mlp.cu", "90a"),
        ("verify_attn_hopper.cu", "90a"),
        ("verify_attn_few_hopper.cu", "90a"),
    ],
)
def test_no_spills(source, arch, tmp_path):
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-Xptxas=-v",
        f"-I{_FFI.parent}",
        "-cubin",  # the device's half alone
        str(_FFI / "cuda" / source),
        "-o",
        str(tmp_path / "out.cubin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    # Products of warpgroups that ptxas runs one after the other, since it could not follow their registers.
    assert "wgmma" not in done.stderr, done.stderr
    functions = list(_functions(done.stderr))
    assert functions, done.stderr
    for name, spills, shared in functions:
        assert spills <= _SPILL_BOUND.get(source, 0), (name, spills)
        assert shared <= _SHARED_LIMIT, (name, shared)  # what is asked for at launch: static_assert
