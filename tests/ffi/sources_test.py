"""sources.bzl names every native source, once, and nothing else."""

import ast
import re


def test_sources_are_listed(request):
    root = request.config.rootpath / "ffi"
    module = ast.parse((root / "sources.bzl").read_text())
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign)
    }
    for name, sources in lists.items():
        assert sources == sorted(set(sources)), f"{name} is not sorted or repeats a file"
    there = {
        path.relative_to(root).as_posix()
        for pattern in ("*.cc", "*.cu")
        for path in root.rglob(pattern)
    }
    assert set().union(*lists.values()) == there


def test_every_kernel_is_everywhere(request):
    """The kernels of the C ABI, on both devices, among the handlers, and in a library without CUDA."""
    root = request.config.rootpath / "ffi"
    header = (root / "ddtree.h").read_text()
    kernels = set(re.findall(r"^int ddtree_(\w+)_cuda\(", header, re.M))
    workspaces = set(re.findall(r"^size_t ddtree_(\w+)_workspace\(", header, re.M))
    assert "verify_attn" in kernels & workspaces
    cpu = {path.stem: path.read_text() for path in (root / "cpu").glob("*.cc")}
    assert set(cpu) == kernels
    for name, text in cpu.items():
        assert re.findall(r"^DDTREE_NO_CUDA_KERNEL\((\w+)\)", text, re.M) == [name]
        stand_ins = re.findall(r"^DDTREE_NO_CUDA_WORKSPACE\((\w+),", text, re.M)
        assert stand_ins == [name] * (name in workspaces)
    # A kernel of several files has a folder.
    sources = [path.relative_to(root / "cuda") for path in (root / "cuda").rglob("*.cu")]
    assert {source.parts[0].removesuffix(".cu") for source in sources} == kernels
    handlers = {path.stem for path in (root / "handlers").glob("*.h")} - {"all", "handler"}
    assert handlers == kernels
    listed = (root / "handlers" / "all.h").read_text()
    assert set(re.findall(r"^  X\((\w+), \w+\)", listed, re.M)) == kernels
    assert set(re.findall(r"^  X\((\w+)\)", listed, re.M)) == workspaces
