"""The torch bridge on the CPU: equal to the JAX primitives bit for bit, without JAX, and clear about bad tensors."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_checks as checks  # noqa: E402
from limits import HANG_SECONDS  # noqa: E402

import ddtree_jax  # noqa: E402
import ddtree_jax.torch as bridge  # noqa: E402
from ddtree_jax import _clib  # noqa: E402

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draft_topk(rng, dtype):
    checks.check_draft_topk(rng, "cpu", dtype, batch=3, depth=7, vocab=2051, k=33)
    checks.check_draft_topk(rng, "cpu", dtype, batch=1, depth=1, vocab=1, k=1)


@pytest.mark.parametrize("keep_spine", [False, True])
@pytest.mark.parametrize("budget", [0, 16, 64, 256])
def test_tree_build(rng, budget, keep_spine):
    checks.check_tree_build(
        rng, "cpu", batch=5, depth=7, k=min(20, budget + 1), budget=budget, keep_spine=keep_spine
    )


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("path", _clib.PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_attn(rng, dtype, path, cache_dtype):
    sizes = dict(batch=2, budget=32, heads=3, rows=90)
    checks.check_verify_attn(rng, "cpu", dtype, **sizes, path=path, cache_dtype=cache_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_attn_has_one_path_on_the_cpu(rng, dtype):
    shape, batch = (2, 9, 3, 576), 2
    query = checks.to_torch(rng.standard_normal(shape).astype(dtype))
    cache = checks.to_torch(rng.standard_normal((1, batch, 40, 576)).astype(dtype))
    lengths = checks.to_torch(rng.integers(0, 32, batch, dtype=np.int32))
    operands = query, cache, lengths, _tree(batch, budget=8)
    plain = bridge.verify_attn(*operands, scale=0.07, layer=0)
    assert plain.isfinite().all() and plain.any()
    for path in _clib.PATHS:
        got = bridge.verify_attn(*operands, scale=0.07, layer=0, path=path)
        checks.assert_same_bits(got, plain, path)


@pytest.mark.parametrize("stop_tokens", [(), (3, 7)])
def test_tree_accept(rng, stop_tokens):
    checks.check_tree_accept(rng, "cpu", batch=6, budget=64, stop_tokens=stop_tokens)


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cache(rng, dtype, cache_dtype):
    sizes = dict(layers=3, batch=4, rows=40, nodes=9, width=576)
    checks.check_cache(rng, "cpu", dtype, **sizes, cache_dtype=cache_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expert_mlp(rng, dtype):
    checks.check_expert_mlp(rng, "cpu", dtype, tokens=5, top_k=2, experts=4, hidden=64, inner=96)


def test_a_layer_may_be_a_tensor(rng):
    cache = torch.zeros(3, 1, 4, 2)
    latents = torch.ones(1, 1, 2)
    lengths = torch.tensor([2], dtype=torch.int32)
    for layer, written in ((torch.tensor(1, dtype=torch.int32), 2), (-1, None)):
        if written is None:
            with pytest.raises(ValueError, match="layer must lie in 0 .. 2, not -1"):
                bridge.append_latents(cache, latents, lengths, layer=layer)
        else:
            bridge.append_latents(cache, latents, lengths, layer=layer)
            assert cache[1, 0, 2].tolist() == [1, 1] and cache.sum() == written


def _tree(batch=2, budget=4):
    log_probs = -torch.arange(6, dtype=torch.float32).repeat(batch, 3, 1)
    token_ids = torch.arange(18, dtype=torch.int32).repeat(batch, 1).view(batch, 3, 6)
    return bridge.tree_build(
        log_probs, token_ids, torch.zeros(batch, dtype=torch.int32), budget=budget
    )


_CACHE = torch.zeros(1, 2, 9, 576)
_LENGTHS = torch.zeros(2, dtype=torch.int32)


def _attend(cache=_CACHE, **options):
    """A call of verify_attn that is sound but for these."""
    query = torch.zeros(2, 5, 1, 576)
    return bridge.verify_attn(
        query, cache, _LENGTHS, _tree(), **{"scale": 1, "layer": 0, **options}
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bridge.draft_topk([[[1.0]]], 1), "logits must be a torch.Tensor .* not list"),
        (
            lambda: bridge.draft_topk(torch.zeros(1, 2, 3, dtype=torch.float16), 1),
            r"logits must be .*bfloat16, not torch.float16: convert it with .to\(torch.float32\)",
        ),
        (lambda: bridge.draft_topk(torch.zeros(2, 3), 1), r"shape \[B, L, V\], not \[2, 3\]"),
        (lambda: bridge.draft_topk(torch.zeros(1, 2, 3), 4), "k must lie in 1 .. 3, not 4"),
        (lambda: bridge.draft_topk(torch.zeros(1, 2, 3), 1.0), "k must be a Python int, not float"),
        (lambda: bridge.draft_topk(torch.zeros(1, 2, 0), 1), "at least one token"),
        (
            lambda: bridge.draft_topk(torch.zeros(3, 2, 4).transpose(0, 1), 1),
            r"logits must be contiguous: call .contiguous\(\)",
        ),
        (
            lambda: bridge.draft_topk(torch.zeros(1, 2, 3, device="meta"), 1),
            "logits is on meta, and the kernels run on cpu and cuda",
        ),
        (
            lambda: bridge.tree_build(
                torch.zeros(1, 2, 3),
                torch.zeros(1, 2, 3, dtype=torch.int32, device="meta"),
                torch.zeros(1, dtype=torch.int32),
                budget=2,
            ),
            r"token_ids must be on cpu like the other tensors, not on meta: move it with .to\('cpu'\)",
        ),
        (lambda: _tree(budget=257), "budget must lie in 0 .. 256, not 257"),
        (
            lambda: bridge.tree_accept(_tree(), torch.zeros(2, 5, dtype=torch.int64)),
            "target_tokens must be torch.int32, not torch.int64",
        ),
        (
            lambda: bridge.tree_accept(_tree(), torch.zeros(2, 6, dtype=torch.int32)),
            r"tree.tokens must have shape \[2, 6\], not \[2, 5\]",
        ),
        (
            lambda: bridge.tree_accept(
                _tree(), torch.zeros(2, 5, dtype=torch.int32), stop_tokens=(2**31,)
            ),
            "a stop token must lie in",
        ),
        (
            lambda: _attend(_CACHE.to(torch.bfloat16)),
            "cache must be torch.float32 or torch.float8_e4m3fn, not torch.bfloat16",
        ),
        (
            lambda: _attend(_CACHE[:, :, :4].contiguous()),
            "cache holds 4 rows, fewer than the tree's 5 nodes",
        ),
        (
            lambda: _attend(path="fastest"),
            "path must be one of auto, portable, hopper, not 'fastest'",
        ),
        (
            lambda: _attend(path=["auto"]),
            r"path must be one of auto, portable, hopper, not \['auto'\]",
        ),
        (
            lambda: _attend(scale=None),
            "scale must be a number, not None",
        ),
        (
            lambda: _attend(scale=1e39),
            r"scale must be finite in float32, at most 3.4e\+38, not 1e\+39",
        ),
        (
            lambda: bridge.append_latents(
                _CACHE, torch.zeros(2, 1, 576), _LENGTHS, layer=0, cache_scale=torch.ones(1)
            ),
            "cache_scale is for a torch.float8_e4m3fn cache, and this one is torch.float32",
        ),
        (
            lambda: bridge.append_latents(
                _CACHE.to(torch.float8_e4m3fn),
                torch.zeros(2, 1, 576),
                _LENGTHS,
                layer=0,
                cache_scale=torch.ones(2),
            ),
            r"cache_scale must have shape \[1\], not \[2\]",
        ),
        (
            lambda: bridge.append_latents(_CACHE, torch.zeros(2, 1, 3), _LENGTHS, layer=0),
            r"latents must have shape \[2, N, 576\], not \[2, 1, 3\]",
        ),
    ],
)
def test_what_is_wrong_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_tuple_is_no_tree_and_a_tree_no_path():
    tree = bridge.tree_build(
        torch.zeros(2, 3, 2), torch.zeros(2, 3, 2, dtype=torch.int32), _LENGTHS, budget=4
    )
    fields = dataclasses.astuple(tree)
    for call in (
        lambda: bridge.tree_accept(fields, torch.zeros(2, 5, dtype=torch.int32)),
        lambda: bridge.verify_attn(
            torch.zeros(2, 5, 1, 576), _CACHE, _LENGTHS, fields, scale=1.0, layer=0
        ),
        lambda: bridge.sglang_verify_inputs(fields, _LENGTHS.to(torch.int64)),
    ):
        with pytest.raises(TypeError, match="tree must be a DraftTree, not tuple"):
            call()
    with pytest.raises(TypeError, match="path must be an AcceptedPath, not DraftTree"):
        bridge.commit_path(_CACHE, tree, _LENGTHS)


_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "nanobind", "flax"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
import torch
import ddtree_jax.torch as bridge
log_probs, ids = bridge.draft_topk(torch.tensor([[[0.0, 2.0, 1.0]]]), 2)
assert ids.tolist() == [[[1, 2]]], ids
try:
    import ddtree_jax
    ddtree_jax.tree_build
except ImportError as error:
    assert str(error) == "blocked: jax", error
else:
    raise AssertionError("the blockade does not work")
print("ran")
"""


def test_works_where_jax_is_not():
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=os.sep,
    )
    assert done.stdout == "ran\n", done.stderr


def test_public_names_are_lazy_and_complete():
    import ast

    source = pathlib.Path(ddtree_jax.__file__).read_text()
    typed = {
        alias.asname: node.module.rpartition(".")[2]
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for node in block.body
        for alias in node.names
    }
    assert typed == ddtree_jax._HOMES
    for name in ddtree_jax.__all__:
        assert getattr(ddtree_jax, name).__name__ == name
    assert set(ddtree_jax.__all__) <= set(dir(ddtree_jax))
    with pytest.raises(AttributeError, match="no attribute 'tree_grow'"):
        ddtree_jax.tree_grow  # noqa: B018


@pytest.fixture
def fresh_library():
    _clib.library.cache_clear()
    yield
    _clib.library.cache_clear()


def test_a_library_that_does_not_load_is_named(fresh_library, monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv("DDTREE_LIB", str(broken))
    with pytest.raises(
        ImportError, match="broken.so is no libddtree.so that loads here .*DDTREE_LIB"
    ):
        bridge.draft_topk(torch.zeros(1, 1, 2), 1)


def test_a_missing_library_is_said(fresh_library, monkeypatch):
    monkeypatch.delenv("DDTREE_LIB", raising=False)
    monkeypatch.setattr(ddtree_jax, "__path__", [])
    with pytest.raises(ImportError, match="libddtree.so is missing: install ddtree_jax"):
        bridge.draft_topk(torch.zeros(1, 1, 2), 1)


def test_another_version_is_refused(fresh_library, monkeypatch):
    monkeypatch.setattr(_clib, "ABI_VERSION", 3)
    with pytest.raises(ImportError, match="speaks version 2 of the C ABI and ddtree_jax 3"):
        bridge.draft_topk(torch.zeros(1, 1, 2), 1)


def test_an_error_of_the_library_is_raised_with_its_text():
    with pytest.raises(
        RuntimeError, match="ddtree_tree_build: this library was built without CUDA"
    ):
        _clib.check("tree_build", 4)


def test_limits_are_those_of_the_primitives():
    from ddtree_jax import tree

    assert bridge.MAX_BUDGET == tree.MAX_BUDGET == _clib.library().ddtree_max_nodes() - 1
    assert bridge.MAX_CANDIDATES == tree.MAX_CANDIDATES
    assert bridge.MAX_DEPTH == tree.MAX_DEPTH
