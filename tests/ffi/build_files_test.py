"""Both builds load every list of sources.bzl, and Bazel's lays out the package that pip's installs."""

import ast
import os
import pathlib

import pytest


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
