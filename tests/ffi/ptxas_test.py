"""The CUDA kernels as ptxas sees them: no spills, and no more shared memory than a block may have on sm_120."""

import pathlib
import re
import shutil
import subprocess

import pytest
from limits import HANG_SECONDS

_FFI = pathlib.Path(__file__).parents[2] / "ffi"
_SOURCES = sorted(
    path.relative_to(_FFI / "cuda").as_posix() for path in (_FFI / "cuda").rglob("*.cu")
)
_SHARED_LIMIT = 99 * 1024  # bytes a block on sm_120

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def _functions(report):
    """(name, spill bytes, shared bytes) of each function in a `ptxas -v` report."""
    blocks = re.split(r"Compiling entry function '", report)[1:]
    for block in blocks:
        name = block.split("'")[0]
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", block)))
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", block)))
        yield name, spills, shared


def _report(source, arch, tmp_path):
    """What `ptxas -v` says of a source."""
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("source", "arch"),
    [
        *((path, "120") for path in _SOURCES),
        ("draft_topk.cu", "90a"),
        ("expert_mlp.cu", "90a"),
        ("verify_attn/launch.cu", "90a"),
        ("verify_attn/launch.cu", "80"),
        ("verify_attn/hopper.cu", "90a"),
        ("verify_attn/hopper_few.cu", "90a"),
    ],
)
def test_no_spills(source, arch, tmp_path):
    report = _report(source, arch, tmp_path)
    # Products of warpgroups that ptxas runs one after the other, since it could not follow their registers.
    assert "wgmma" not in report, report
    functions = list(_functions(report))
    assert functions, report
    for name, spills, shared in functions:
        assert spills == 0, (name, spills)
        assert shared <= _SHARED_LIMIT, (name, shared)  # what is asked for at launch: static_assert


@pytest.mark.parametrize(("arch", "is_hoppers"), [("90a", True), ("90", False), ("80", False)])
def test_registers_tell_hoppers_code(arch, is_hoppers, tmp_path):
    """By them `verify_attn` knows at run time whether the card has the kernels or the traps in their place."""
    source = (_FFI / "cuda" / "verify_attn" / "hopper.cu").read_text()
    (bound,) = map(int, re.findall(r"numRegs > (\d+)", source))
    used = list(
        map(
            int,
            re.findall(r"Used (\d+) registers", _report("verify_attn/hopper.cu", arch, tmp_path)),
        )
    )
    assert len(used) == 3 and all((count > bound) == is_hoppers for count in used), used
