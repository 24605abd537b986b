"""Calls of the CUDA entry points in a process that sees no GPU: what passes their checks ends as a failed launch."""

import concurrent.futures
import contextlib
import ctypes
import multiprocessing
import os
from unittest import mock

from ddtree_jax import _clib

OK, INVALID, LAUNCH_FAILED, WRONG_VERSION, NO_CUDA = range(5)  # ddtree_status

#: Sound sizes of each kernel.
SIZES = {
    "draft_topk": dict(rows=2, vocab=3000, k=4),
    "tree_build": dict(batch=1, depth=2, k=3, budget=4),
    "verify_attn": dict(
        layers=1, batch=1, rows=9, nodes=3, heads=2, dtype=_clib.BF16, cache_dtype=_clib.E4M3
    ),
    "append_latents": dict(layers=1, batch=1, rows=4, nodes=2, width=3, cache_dtype=_clib.E4M3),
    "tree_accept": dict(batch=1, max_nodes=4, depth=2, num_stops=1),
    "commit_path": dict(layers=1, batch=1, rows=4, width=3, path=2),
    "expert_mlp": dict(tokens=1, top_k=1, experts=2, hidden=32, inner=32, dtype=_clib.BF16),
}
#: What each workspace query takes.
QUERIES = {
    "draft_topk": ("rows", "vocab", "k"),
    "tree_build": ("batch", "depth", "k", "budget"),
    "verify_attn": ("batch", "rows", "nodes", "heads", "dtype"),
    "expert_mlp": ("tokens", "top_k", "experts", "hidden", "inner", "dtype"),
}
_HELD = ctypes.create_string_buffer(64)  # nothing ever reads or writes it
_START = ctypes.addressof(_HELD) + -ctypes.addressof(_HELD) % 16


def pointers(name: str) -> list[str]:
    """The fields of a kernel's arrays; what is the CPU's alone and the workspace are not among them."""
    return [
        field
        for field, kind in _clib.BLOCKS[name]._fields_
        if kind is ctypes.c_void_p and field not in ("partial", "workspace")
    ]


def status(name: str, **changes) -> int:
    """The status of a call that is sound but for `changes`.

    Every array starts at a multiple of 16 bytes and the workspace is ample; a changed pointer is the number of
    bytes that its array lies behind that, or None for a null pointer.
    """
    block = _clib.BLOCKS[name](abi_version=_clib.ABI_VERSION, **SIZES[name])
    if hasattr(block, "workspace"):
        block.workspace, block.workspace_bytes = _START, 2**40
    for field in pointers(name):
        setattr(block, field, _START)
    for field, value in changes.items():
        pointer = dict(block._fields_)[field] is ctypes.c_void_p
        setattr(block, field, _START + value if pointer and value is not None else value)
    return getattr(_clib.library(), f"ddtree_{name}_cuda")(ctypes.byref(block), None)


def status_of_null(name: str) -> int:
    """The status of a call without a block."""
    return getattr(_clib.library(), f"ddtree_{name}_cuda")(None, None)


def workspace(name: str, sizes: dict[str, int]) -> int:
    """Bytes that the workspace query answers."""
    query = getattr(_clib.library(), f"ddtree_{name}_workspace")
    return query(*(sizes[field] for field in QUERIES[name]))


@contextlib.contextmanager
def without_gpu():
    """Yields `call(function, *arguments, **options)`, which runs one of these functions without a GPU in sight.

    On a GPU a call that is accepted would send kernels after the host's memory, and CUDA cannot be used in a
    process after that.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool,
    ):
        yield lambda *arguments, **options: pool.submit(*arguments, **options).result()
