"""Both builds load every list of sources.bzl, Bazel's lays out what pip's installs, and CMake's says how it builds."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from limits import HANG_SECONDS


def test_both_builds_load_every_list(request):
    root = request.config.rootpath / "ffi"
    lists = [
        node.targets[0].id
        for node in ast.parse((root / "sources.bzl").read_text()).body
        if isinstance(node, ast.Assign)
    ]
    bazel = (root / "BUILD.bazel").read_text()
    cmake = (root / "CMakeLists.txt").read_text()
    assert len(lists) >= 4
    for name in lists:
        assert f"srcs = {name}" in bazel, f"ffi/BUILD.bazel compiles no {name}"
        assert f"ddtree_sources({name} " in cmake, f"ffi/CMakeLists.txt compiles no {name}"


@pytest.mark.skipif("TEST_SRCDIR" not in os.environ, reason="needs Bazel")
def test_the_package_is_the_one_that_bazel_built():
    import ddtree_jax
    from ddtree_jax import models

    runfiles = pathlib.Path(os.environ["TEST_SRCDIR"])
    assert pathlib.Path(ddtree_jax.__file__).is_relative_to(runfiles)
    assert pathlib.Path(models.__file__).is_relative_to(runfiles)


@pytest.fixture
def configure(request, tmp_path):
    """Runs CMake on the sources; returns whether it went well, and all that it said on one line."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("needs cmake and g++")

    def run(*options, **variables):
        command = ["cmake", "-S", request.config.rootpath / "ffi", "-B", tmp_path / "build"]
        command += [f"-D{option}" for option in options]
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        return done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    return run


def test_python_without_headers_is_one_sentence(configure, tmp_path):
    well, said = configure(
        "DDTREE_CUDA=OFF",
        f"Python_EXECUTABLE={sys.executable}",
        f"Python_INCLUDE_DIR={tmp_path / 'none'}",
    )
    assert not well
    assert said.count("CMake Error") == 1
    assert (
        f"{sys.executable} has no headers (Python.h): install python3-dev "
        "(Debian and Ubuntu: apt-get install python3-dev)" in said
    )


def test_no_compiler_is_one_sentence(configure):
    well, said = configure("DDTREE_PYTHON=OFF", "DDTREE_CUDA=OFF", CXX="/nonexistent/c++")
    assert not well
    assert said.count("CMake Error") == 1
    assert "install one (Debian and Ubuntu: apt-get install g++)" in said


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("chosen", "built"),
    [
        ("", "90a-real, 120-real, 80-virtual, 120-virtual"),
        ("90,120-real", "90a-real, 120-real"),
    ],
)
def test_architectures_are_chosen_and_said(configure, chosen, built):
    well, said = configure("DDTREE_PYTHON=OFF", f"DDTREE_CUDA_ARCHS={chosen}")
    assert well, said
    assert re.search(r"building CUDA code with nvcc [0-9.]+ for ([^()]*) \(", said)[1] == built


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_native_architecture_is_the_gpus_own(configure):
    well, said = configure("DDTREE_PYTHON=OFF", "DDTREE_CUDA_ARCHS=native")
    if shutil.which("nvidia-smi") is None:
        assert not well
        assert "DDTREE_CUDA_ARCHS=native but no GPU answers on this machine: name the" in said
        return
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capabilities = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    numbers = {line.replace(".", "") for line in capabilities.split()}
    assert well, said
    listed = re.search(r"building CUDA code with nvcc [0-9.]+ for ([^()]*) \(", said)[1]
    assert set(listed.split(", ")) == {f"{n}{'a' if n == '90' else ''}-real" for n in numbers}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_an_old_toolkit_is_one_sentence(configure, tmp_path):
    old = tmp_path / "nvcc"
    release = "Cuda compilation tools, release 12.4, V12.4.131"
    old.write_text(
        f'#!/bin/sh\n[ "$*" != --version ] && exec {shutil.which("nvcc")} "$@"\necho "{release}"\n'
    )
    old.chmod(0o755)
    well, said = configure("DDTREE_PYTHON=OFF", CUDACXX=str(old))
    assert not well
    assert said.count("CMake Error") == 1
    assert "nvcc 12.4 is older than 12.8, which sm_120 needs: set DDTREE_CUDA_ARCHS=" in said
