"""sources.bzl names every native source, once, and nothing else."""

import ast


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


def test_both_devices_have_a_file_for_each_kernel(request):
    root = request.config.rootpath / "ffi"
    cpu = {path.stem for path in (root / "cpu").glob("*.cc")}
    handlers = {path.stem for path in (root / "handlers").glob("*.h")} - {"all", "handler"}
    assert handlers == cpu
    # A kernel of several files has a folder.
    sources = [path.relative_to(root / "cuda") for path in (root / "cuda").rglob("*.cu")]
    assert {source.parts[0].removesuffix(".cu") for source in sources} == cpu
