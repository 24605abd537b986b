"""What Python repeats of ddtree.h is what ddtree.h says."""

import ctypes
import re

import pytest

from ddtree_jax import _clib, tree


@pytest.fixture(scope="module")
def header(request):
    return (request.config.rootpath / "ffi" / "ddtree.h").read_text()


def test_blocks_are_those_of_the_header(header):
    """Names, order, types and sizes; the compiler lays a block out as ctypes does."""
    kinds = {
        "size_t": ctypes.c_size_t,
        "int64_t": ctypes.c_int64,
        "int32_t": ctypes.c_int32,
        "float": ctypes.c_float,
    }
    assert re.search(r"DDTREE_ABI_VERSION = (\d+)", header)[1] == str(_clib.ABI_VERSION)
    found = {}
    for name, body in re.findall(r"typedef struct ddtree_(\w+)_args \{\n(.*?)\n\}", header, re.S):
        fields = [("abi_version", ctypes.c_uint32)]
        for line in body.splitlines()[1:]:
            kind, names = re.match(r"\s*(?:const )?(\w+)\s*(.*?);", line).groups()
            for field in names.split(","):
                pointer = "*" in line.split(";")[0]
                fields.append((field.strip(" *"), ctypes.c_void_p if pointer else kinds[kind]))
        found[name] = fields
    assert found == {name: block._fields_ for name, block in _clib.BLOCKS.items()}


def test_limits_and_statuses_are_those_of_the_header(header):
    numbers = {name: int(value) for name, value in re.findall(r"DDTREE_(\w+) = (\d+)", header)}
    assert numbers["MAX_NODES"] == tree.MAX_BUDGET + 1
    assert numbers["MAX_CANDIDATES"] == tree.MAX_CANDIDATES
    assert numbers["MAX_DEPTH"] == tree.MAX_DEPTH
    assert (numbers["F32"], numbers["BF16"]) == (_clib.F32, _clib.BF16)
    assert numbers["NO_CUDA"] == _clib._NO_CUDA
