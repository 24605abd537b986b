"""The CUDA entry points refuse bad blocks before they touch a device: no GPU is needed to see it.

Beside every refused block stands one that differs in the refused field alone and passes the checks.
"""

import ctypes
import math
import types

import cuda_calls
import pytest
from cuda_calls import INVALID, LAUNCH_FAILED, NO_CUDA, OK, SIZES, WRONG_VERSION

from ddtree_jax import _clib

#: A size at its limit and one step over it, with what else must change.
LIMITS = [
    ("draft_topk", "k", 256, 257, {}),
    ("draft_topk", "k", 1, 0, {}),
    ("draft_topk", "vocab", 4, 3, {}),
    ("draft_topk", "vocab", 1 << 22, (1 << 22) + 1, {}),
    ("draft_topk", "rows", 2**31 - 1, 2**31, {}),
    ("tree_build", "budget", 256, 257, {}),
    ("tree_build", "depth", 31, 32, {}),
    ("tree_build", "k", 256, 257, {}),
    ("tree_build", "batch", 2**31 - 1, 2**31, {}),
    ("verify_attn", "nodes", 257, 258, dict(rows=999)),
    ("verify_attn", "nodes", 9, 10, {}),
    ("verify_attn", "nodes", 1, 0, {}),
    ("verify_attn", "heads", 1, 0, {}),
    ("verify_attn", "layers", 1, 0, {}),
    ("verify_attn", "layers", 2**31 - 1, 2**31, {}),  # planes of the cache are 32-bit indices
    ("verify_attn", "layers", 2**30 - 1, 2**30, dict(batch=2)),
    ("verify_attn", "path", 2, 3, {}),
    ("verify_attn", "path", 0, -1, {}),
    ("verify_attn", "cache_dtype", _clib.E4M3, 3, {}),
    ("verify_attn", "cache_dtype", _clib.BF16, _clib.F32, dict(cache_scale=None)),
    ("append_latents", "cache_dtype", _clib.E4M3, 3, {}),
    ("append_latents", "cache_dtype", _clib.F32, _clib.BF16, dict(cache_scale=None)),
    ("append_latents", "width", 1, 0, {}),
    ("append_latents", "width", 2**29 - 1, 2**29, {}),
    ("append_latents", "nodes", (2**31 - 1) * 256 // 3, (2**31 - 1) * 256 // 3 + 1, {}),  # a grid
    ("tree_accept", "max_nodes", 257, 258, {}),
    ("tree_accept", "max_nodes", 1, 0, {}),
    ("tree_accept", "batch", 2**31 - 1, 2**31, {}),
    ("tree_accept", "depth", 2**31 - 130, 2**31 - 129, {}),  # a block's threads step over it
    ("commit_path", "width", 1, 0, {}),
    ("commit_path", "path", 2**31 - 9, 2**31 - 8, {}),
    ("commit_path", "layers", (2**31 - 1) * 128 // 3, (2**31 - 1) * 128 // 3 + 1, {}),  # a grid
    ("expert_mlp", "hidden", 64, 48, {}),
    ("expert_mlp", "inner", 32, 16, {}),
    ("expert_mlp", "experts", 2048, 2049, {}),
]
#: Arrays of bytes, in the calls of these tests.
BYTES = {"tree_accept": {"finished"}, "append_latents": {"cache"}}
#: Arrays that kernels read or write 16 bytes at a time; the others need lie at multiples of their elements.
ALIGNED = {
    "verify_attn": {"query", "cache", "out"},
    "expert_mlp": {"x", "gate_up", "gate_up_scale", "down", "down_scale", "out"},
}


@pytest.fixture(scope="module")
def call():
    if cuda_calls.status_of_null("tree_build") == NO_CUDA:
        pytest.skip("the library was built without CUDA")
    with cuda_calls.without_gpu() as call:
        yield call


@pytest.fixture(scope="module")
def status(call):
    return lambda name, **changes: call(cuda_calls.status, name, **changes)


@pytest.mark.parametrize("name", SIZES)
def test_versions_sizes_and_dtypes(name, call, status):
    assert status(name) == LAUNCH_FAILED
    assert status(name, abi_version=_clib.ABI_VERSION + 1) == WRONG_VERSION
    assert call(cuda_calls.status_of_null, name) == INVALID
    for field, kind in _clib.BLOCKS[name]._fields_:
        if kind is ctypes.c_int64:
            for value in (-1, -(2**63), 2**62, 2**63 - 1):
                assert status(name, **{field: value}) == INVALID, (field, value)
        elif field == "dtype":
            assert status(name, dtype=_clib.F32) == status(name, dtype=_clib.BF16) == LAUNCH_FAILED
            # Copies know e4m3; numbers that are multiplied are no e4m3.
            e4m3 = LAUNCH_FAILED if name == "commit_path" else INVALID
            assert status(name, dtype=_clib.E4M3) == e4m3
            assert status(name, dtype=-1) == status(name, dtype=3) == INVALID


@pytest.mark.parametrize("name", SIZES)
def test_pointers(name, status):
    for field in cuda_calls.pointers(name):
        optional = field == "cache_scale"
        assert status(name, **{field: None}) == (LAUNCH_FAILED if optional else INVALID), field
        aligned = 16 if field in ALIGNED.get(name, ()) else 1 if field in BYTES.get(name, ()) else 4
        assert status(name, **{field: aligned}) == LAUNCH_FAILED, field
        for less in {1, aligned // 2} - {0, aligned}:
            assert status(name, **{field: less}) == INVALID, (field, less)


def test_arrays_without_elements_may_be_null(status):
    for name in SIZES:
        empty = {"draft_topk": "rows", "expert_mlp": "tokens"}.get(name, "batch")
        needed = {"layer", "stop_tokens", "gate_up", "gate_up_scale", "down", "down_scale"}
        null = dict.fromkeys(set(cuda_calls.pointers(name)) - needed)  # a scale may always be
        assert status(name, **null, **{empty: 0}) == OK, name
        assert status(name, **null) == INVALID, name


@pytest.mark.parametrize("name, field, most, over, rest", LIMITS, ids=str)
def test_limits(name, field, most, over, rest, status):
    assert status(name, **{field: most}, **rest) == LAUNCH_FAILED
    assert status(name, **{field: over}, **rest) == INVALID


@pytest.mark.parametrize("name", ["draft_topk", "verify_attn", "expert_mlp"])
def test_workspaces(name, status):
    needed = cuda_calls.workspace(name, SIZES[name])
    assert needed > 0
    assert status(name, workspace_bytes=needed) == LAUNCH_FAILED
    assert status(name, workspace=16, workspace_bytes=needed) == LAUNCH_FAILED
    for change in (dict(workspace_bytes=needed - 1), dict(workspace=None), dict(workspace=8)):
        assert status(name, **{"workspace_bytes": needed, **change}) == INVALID, change


#: The arrays of each kernel: bytes of an element, then its sizes.
ARRAYS = {
    "draft_topk": lambda a: [(a.element, a.rows, a.vocab), (4, a.rows, a.k)],
    "tree_build": lambda a: [
        (4, a.batch, a.depth, a.k),
        (4, a.batch, a.budget + 1, (a.budget + 32) // 32),
    ],
    "verify_attn": lambda a: [
        (a.element, a.batch, a.nodes, a.heads, 576),
        (a.cache_element, a.layers, a.batch, a.rows, 576),
        (4, a.batch, a.nodes, (a.nodes + 31) // 32),
        (4, a.layers),
    ],
    "append_latents": lambda a: [
        (a.cache_element, a.layers, a.batch, a.rows, a.width),
        (a.element, a.batch, a.nodes, a.width),
        (4, a.layers),
    ],
    "tree_accept": lambda a: [
        (4, a.batch, a.max_nodes),
        (4, a.batch, a.depth + 1),
        (4, a.num_stops),
    ],
    "commit_path": lambda a: [
        (a.element, a.layers, a.batch, a.rows, a.width),
        (4, a.batch, a.path),
    ],
    "expert_mlp": lambda a: [
        (a.element, a.tokens, a.hidden),
        (4, a.tokens, a.top_k),
        (4, a.experts, 2 * a.inner, a.hidden // 8),
        (2, a.experts, 2 * a.inner, a.hidden // 32),
    ],
}


@pytest.mark.parametrize("name", SIZES)
def test_two_and_three_huge_sizes(name, rng, status):
    """Refused wherever the bytes of an array are more than int64 holds; an answer in any case."""
    element = {_clib.F32: 4, _clib.BF16: 2, _clib.E4M3: 1}
    fields = [field for field in SIZES[name] if "dtype" not in field]
    overflows = 0
    for _ in range(200):
        sizes = dict(SIZES[name])
        product = 1
        for field in rng.permutation(fields)[: rng.integers(2, 4)]:
            size = 2 ** int(rng.integers(16, 63)) - int(rng.integers(2))
            if rng.random() < 0.5:  # about where int64 ends
                size = (2**63 - 1) // product // int(rng.integers(1, 40))
            sizes[field] = size // 32 * 32 if name == "expert_mlp" else size
            product = max(product * size, 1) if product * size < 2**63 else 1
        block = types.SimpleNamespace(**sizes)
        block.element = element[sizes.get("dtype", _clib.F32)]
        block.cache_element = element[sizes.get("cache_dtype", _clib.F32)]
        got = status(name, **sizes)
        if any(math.prod(array) >= 2**63 for array in ARRAYS[name](block)):
            overflows += 1
            assert got == INVALID, sizes
        assert got in (OK, INVALID, LAUNCH_FAILED), sizes
    assert overflows > 20


#: Sizes at and beyond limits, from which random ones are drawn; the first three of each are served.
EDGES = {
    "draft_topk": dict(
        rows=[0, 1, 77, 4097, 2**31 - 1, 2**31, 2**62, -1],
        vocab=[1, 255, 3000, 2**22, 2**22 + 1, 2**31, 0, -1],
        k=[1, 4, 255, 256, 257, 0, -1],
    ),
    "tree_build": dict(
        batch=[0, 3, 7, -1], depth=[0, 7, 31, 32], k=[1, 4, 256, 257], budget=[0, 9, 256, 257]
    ),
    "verify_attn": dict(
        batch=[0, 1, 5, 2**22, 2**31 - 1, 2**31, 2**62, -1],
        rows=[1, 300, 10**5, 2**31 - 129, 2**31 - 128, 2**62, 0, -1],
        nodes=[1, 16, 257, 258, 0, -1],
        heads=[1, 64, 2**20, 2**31 - 1, 2**31, 2**62, 0, -1],
        dtype=[_clib.BF16, _clib.BF16, _clib.F32, 2, -1],
    ),
    "expert_mlp": dict(
        tokens=[0, 1, 9, 2**22, 2**25, 2**31 - 1, 2**31, 2**62, -1],
        top_k=[0, 1, 8, 2**25 - 1, 2**25, 2**62, -1],
        experts=[0, 1, 384, 2048, 2049, 2**62, -1],
        hidden=[0, 32, 7168, 2**20, 2**25 - 32, 2**25, 2**58, 48, -32],
        inner=[0, 32, 2048, 2**24 - 32, 2**24, 2**58, 16, -32],
        dtype=[_clib.BF16, _clib.F32, 2],
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_query_is_right_for_whatever_the_call_takes(name, rng, call, status):
    """Not a byte less does, none is asked for in vain, and 0 is the answer for all that is refused."""
    refused = needing = 0
    for _ in range(400):
        # Few odd ones together: one that is refused hides whether another is.
        sizes = {
            field: int(rng.choice(edges if rng.random() < 0.2 else edges[:3]))
            for field, edges in EDGES[name].items()
        }
        needed = call(cuda_calls.workspace, name, sizes)
        if status(name, **sizes, workspace_bytes=2**63) == INVALID:
            refused += 1
            assert needed == 0, sizes
        elif needed == 0:
            none = dict(workspace=None, workspace_bytes=0)
            assert status(name, **sizes, **none) in (OK, LAUNCH_FAILED), sizes
        else:
            needing += 1
            assert status(name, **sizes, workspace_bytes=needed) == LAUNCH_FAILED, sizes
            assert status(name, **sizes, workspace_bytes=needed - 1) == INVALID, sizes
    print(name, "refused", refused, "needing", needing)
    assert refused > 20 and (needing > 20 or name == "tree_build")
