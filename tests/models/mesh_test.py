"""Decoding over meshes of CPU devices: the same text, and only what must be moved between devices."""

import pathlib

import programs
import pytest

_TESTS = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "check",
    [
        "attention",
        "embedding",
        "experts",
        "whole_operands",
        "greedy_float",
        "greedy_int4",
        "sampling",
        "shard_map",
        "loop",
    ],
)
def test_on_four_devices(rng, tmp_path, check):
    done = programs.run(
        _TESTS / "mesh_checks.py",
        check,
        rng.integers(2**32),
        paths=[_TESTS, _TESTS.parent / "examples"],
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        cwd=tmp_path,
    )
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "passed", done.stderr
