"""The CUDA entry points refuse bad blocks before they touch a device: no GPU is needed to see it."""

import ctypes

import pytest

from ddtree_jax import _clib

INVALID, WRONG_VERSION, NO_CUDA = 1, 3, 4

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
#: One step over each limit.
LIMITS = [
    ("draft_topk", dict(k=257)),
    ("draft_topk", dict(k=0)),
    ("draft_topk", dict(vocab=3)),
    ("draft_topk", dict(vocab=(1 << 22) + 1)),
    ("tree_build", dict(budget=257)),
    ("tree_build", dict(depth=32)),
    ("tree_build", dict(k=257)),
    ("verify_attn", dict(nodes=258, rows=999)),
    ("verify_attn", dict(nodes=10)),
    ("verify_attn", dict(heads=0)),
    ("verify_attn", dict(layers=0)),
    ("verify_attn", dict(path=3)),
    ("verify_attn", dict(path=-1)),
    ("verify_attn", dict(cache_dtype=_clib.F32)),
    ("verify_attn", dict(cache_dtype=_clib.BF16)),  # which has no scale
    ("verify_attn", dict(cache_dtype=3)),
    ("append_latents", dict(width=0)),
    ("append_latents", dict(cache_dtype=_clib.BF16)),
    ("append_latents", dict(cache_dtype=_clib.F32)),
    ("append_latents", dict(cache_dtype=3)),
    ("tree_accept", dict(max_nodes=258)),
    ("commit_path", dict(width=0)),
    ("expert_mlp", dict(hidden=48)),
    ("expert_mlp", dict(inner=16)),
    ("expert_mlp", dict(experts=2049)),
]


def _block(name, address):
    """A block that is sound but for its addresses, which lead to the host: no call of it may be accepted."""
    block = _clib.BLOCKS[name](abi_version=_clib.ABI_VERSION, **SIZES[name])
    for field, kind in block._fields_:
        if kind is ctypes.c_void_p:
            setattr(block, field, address)
    return block


def _status(name, block):
    return getattr(_clib.library(), f"ddtree_{name}_cuda")(ctypes.byref(block), None)


@pytest.fixture
def address():
    held = ctypes.create_string_buffer(1 << 16)
    start = ctypes.addressof(held)
    yield start + -start % 16


@pytest.fixture(autouse=True)
def _needs_cuda(address):
    block = _block("tree_build", address)
    block.abi_version = 0
    if _status("tree_build", block) == NO_CUDA:
        pytest.skip("the library was built without CUDA")


@pytest.mark.parametrize("name", SIZES)
def test_versions_pointers_sizes_and_dtypes(name, address):
    block = _block(name, address)
    block.abi_version += 1
    assert _status(name, block) == WRONG_VERSION
    assert getattr(_clib.library(), f"ddtree_{name}_cuda")(None, None) == INVALID
    for field, kind in block._fields_:
        bad = []
        if kind is ctypes.c_void_p and field != "workspace":
            is_bytes = field == "finished" or getattr(block, f"{field}_dtype", None) == _clib.E4M3
            bad = (
                [None]
                if is_bytes
                else [address + 1]
                if field == "cache_scale"
                else [None, address + 1]
            )
        elif kind is ctypes.c_int64:
            bad = [-1, -(2**63), 2**62, 2**63 - 1]
        elif field == "dtype":
            bad = [-1, 3] if name == "commit_path" else [-1, _clib.E4M3, 3]
        for value in bad:
            block = _block(name, address)
            setattr(block, field, value)
            assert _status(name, block) == INVALID, (field, value)


@pytest.mark.parametrize("name, change", LIMITS, ids=str)
def test_limits(name, change, address):
    block = _block(name, address)
    for field, value in change.items():
        setattr(block, field, value)
    assert _status(name, block) == INVALID


@pytest.mark.parametrize("name", ["draft_topk", "verify_attn"])
def test_workspaces(name, address):
    sizes = dict(SIZES[name])
    if name == "verify_attn":
        sizes = [sizes[field] for field in ("batch", "rows", "nodes", "heads", "dtype")]
    else:
        sizes = list(sizes.values())
    query = getattr(_clib.library(), f"ddtree_{name}_workspace")
    needed = query(*sizes)
    assert needed > 0 and query(-1, *sizes[1:]) == 0
    for there, size in ((address, needed - 1), (None, needed), (address + 4, needed)):
        block = _block(name, address)
        block.workspace, block.workspace_bytes = there, size
        assert _status(name, block) == INVALID
