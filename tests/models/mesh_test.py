"""Decoding over meshes of CPU devices: the same text, and only what must be moved between devices."""

import os
import pathlib
import subprocess
import sys

import pytest

_CHECKS = pathlib.Path(__file__).resolve().parents[1] / "mesh_checks.py"


@pytest.mark.parametrize(
    "check",
    [
        "attention",
        "experts",
        "whole_operands",
        "greedy_float",
        "greedy_int4",
        "sampling",
        "loop",
    ],
)
def test_on_four_devices(rng, tmp_path, check):
    tests = _CHECKS.parent
    folders = [str(tests), str(tests.parent / "examples"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(_CHECKS), check, str(rng.integers(2**32))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "passed", done.stderr
