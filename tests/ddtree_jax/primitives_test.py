"""The primitives as JAX sees them: names, transformations, lowerings and refusals."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from limits import HANG_SECONDS
from primitive_checks import random_attention

import ddtree_jax
from ddtree_jax import _ffi

B, L, V, K, BUDGET, N, H, S, LAYERS = 2, 7, 50, 16, 16, 17, 3, 64, 2


def round_of(logits, roots, query, cache, latents, lengths, target, *, layer=1):
    """One round through every primitive."""
    log_probs, token_ids = ddtree_jax.draft_topk(logits, K)
    tree = ddtree_jax.tree_build(log_probs, token_ids, roots, budget=BUDGET, keep_spine=True)
    cache = ddtree_jax.append_latents(cache, latents, lengths, layer=layer)
    mixed = ddtree_jax.verify_attn(query, cache, lengths, tree, scale=0.07, layer=layer)
    path = ddtree_jax.tree_accept(tree, target, stop_tokens=(3,))
    cache = ddtree_jax.commit_path(cache, path, lengths)
    return log_probs, tree, mixed, path, cache


def round_arguments(rng, *leading):
    """Arguments of `round_of`, with more axes in front of every one of them."""
    shape = leading
    return (
        rng.normal(size=(*shape, B, L, V)).astype(np.float32),
        rng.integers(0, V, (*shape, B), dtype=np.int32),
        rng.normal(size=(*shape, B, N, H, 576)).astype(np.float32),
        rng.normal(size=(*shape, LAYERS, B, S, 576)).astype(np.float32),
        rng.normal(size=(*shape, B, N, 576)).astype(np.float32),
        rng.integers(0, S - N, (*shape, B), dtype=np.int32),
        rng.integers(0, V, (*shape, B, N), dtype=np.int32),
    )


NAMES = (
    "draft_topk",
    "tree_build",
    "append_latents",
    "verify_attn",
    "tree_accept",
    "commit_path",
)


def test_a_jaxpr_names_the_primitives(rng):
    jaxpr = jax.make_jaxpr(round_of)(*round_arguments(rng))
    seen = [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]
    assert [name for name in seen if name in NAMES] == list(NAMES)


def test_cuda_lowering_names_the_kernels(rng, monkeypatch):
    traced = jax.jit(round_of).trace(*round_arguments(rng))
    if _ffi.cuda is None:
        with pytest.raises(NotImplementedError, match="no CUDA kernels"):
            traced.lower(lowering_platforms=("cuda",))
        sizes = {f"{name}_workspace": lambda *_: 1000 for name in NAMES}
        monkeypatch.setattr(_ffi, "cuda", types.SimpleNamespace(**sizes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in NAMES:
        assert f"@ddtree_{name}(" in text
    assert text.count("output_operand_aliases") == 2  # append_latents and commit_path


def test_vmap_equals_a_loop(rng):
    arguments = round_arguments(rng, 3)
    mapped = jax.jit(jax.vmap(round_of))(*arguments)
    looped = [round_of(*(a[i] for a in arguments)) for i in range(3)]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *looped)
    jax.tree.map(np.testing.assert_array_equal, mapped, want)


def test_vmap_and_a_loop_over_an_e4m3_cache(rng):
    """The scale of the layers is shared by all requests, and may be computed."""
    _, _, query, cache, latents, lengths, _ = round_arguments(rng, 3)
    cache = cache.astype(E4M3)
    tree = a_tree(B, N - 1)

    def both(query, cache, latents, lengths, scale):
        for layer in range(LAYERS):
            cache = ddtree_jax.append_latents(
                cache, latents, lengths, layer=layer, cache_scale=2 * scale
            )
        attend = functools.partial(
            ddtree_jax.verify_attn, query, cache, lengths, tree, scale=0.1, cache_scale=2 * scale
        )
        outs = jax.lax.map(lambda layer: attend(layer=layer), jnp.arange(LAYERS))
        return outs, jax.lax.bitcast_convert_type(cache, jnp.uint8)

    scale = np.exp2(rng.uniform(-2, 2, LAYERS)).astype(np.float32)
    axes = (0, 0, 0, 0, None)
    mapped = jax.jit(jax.vmap(both, axes))(query, cache, latents, lengths, scale)
    for i in range(3):
        one = both(query[i], cache[i], latents[i], lengths[i], scale)
        for got, want in zip(mapped, one, strict=True):
            np.testing.assert_array_equal(got[i], want)
    with pytest.raises(NotImplementedError, match="cannot map over operand 4"):
        jax.vmap(both)(query, cache, latents, lengths, np.stack([scale] * 3))


def test_vmap_over_other_axes_and_of_one_operand(rng):
    arguments = list(round_arguments(rng))
    want = [round_of(*arguments[:6], arguments[6] + i) for i in range(2)]
    target = np.stack([arguments[6] + i for i in range(2)], axis=-1)
    axes = (None,) * 6 + (2,)
    mapped = jax.vmap(round_of, in_axes=axes)(*arguments[:6], target)
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *want)
    jax.tree.map(np.testing.assert_array_equal, mapped, want)


def test_vmap_of_a_shared_operand_is_refused(rng):
    arguments = round_arguments(rng)
    with pytest.raises(
        NotImplementedError, match=r"append_latents.* operand 3, int32\[2\].*lax.map"
    ):
        jax.vmap(lambda layer: round_of(*arguments, layer=layer))(jnp.arange(2))
    mapped = jax.lax.map(lambda layer: round_of(*arguments, layer=layer), jnp.arange(2))
    want = [round_of(*arguments, layer=layer) for layer in range(2)]
    np.testing.assert_array_equal(mapped[4], np.stack([one[4] for one in want]))


def test_vmap_over_nothing_and_over_empty_batches(rng):
    for leading in (0, 3):
        arguments = round_arguments(rng, leading)
        if leading:  # No requests in any of the three.
            arguments = [np.take(a, [], axis=2 if i == 3 else 1) for i, a in enumerate(arguments)]
        got = jax.jit(jax.vmap(round_of))(*arguments)
        batch = 0 if leading else B
        assert got[0].shape == (leading, batch, L, K)
        assert got[2].shape == (leading, batch, N, H, 512)
        assert got[4].shape == (leading, LAYERS, batch, S, 576)


def test_every_primitive_in_a_while_loop(rng):
    logits, roots, query, cache, latents, lengths, target = round_arguments(rng)
    lengths = np.array([0, 3], np.int32)

    def body(state):
        step, cache, lengths, roots, total = state
        _, _, mixed, path, cache = round_of(logits, roots, query, cache, latents, lengths, target)
        last = jnp.take_along_axis(path.tokens, path.num_emitted[:, None] - 1, axis=1)[:, 0]
        return step + 1, cache, lengths + path.num_emitted, last, total + jnp.sum(jnp.abs(mixed))

    state = (jnp.int32(0), jnp.asarray(cache), jnp.asarray(lengths), roots, jnp.float32(0))
    looped = jax.jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 5, body, s))(state)
    for _ in range(5):
        state = body(state)
    for got, want in zip(looped[:4], state[:4], strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(looped[4], state[4], rtol=1e-4)


def attend_chain(query, cache, lengths):
    tree = ddtree_jax.chain_tree(np.zeros((1, N), np.int32), np.full(1, N, np.int32))
    return ddtree_jax.verify_attn(query, cache, lengths, tree, scale=0.1, layer=0)


SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import primitives_test as t
assert len(jax.devices()) == 2
arguments = t.round_arguments(np.random.default_rng({seed}))
batch, cache = P("x"), P(None, "x")
specs = (batch, batch, batch, cache, batch, batch, batch)
tree = jax.tree.map(lambda _: batch, jax.eval_shape(t.round_of, *arguments))
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = jax.jit(jax.shard_map(
    t.round_of, mesh=mesh, in_specs=specs, out_specs=(*tree[:4], cache), check_vma=True))
placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments, specs)]
got, want = sharded(*placed), jax.jit(t.round_of)(*arguments)
assert got[4].sharding.spec == cache
jax.tree.map(np.testing.assert_array_equal, got, want)
text = sharded.lower(*placed).compile().as_text()
assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective"))

# What is the same on every device may meet what is not.
query, lengths = arguments[2][:1], arguments[5][:1]
def attend(cache):
    out = t.attend_chain(query, cache, lengths)
    assert jax.typeof(out).mat.varying == jax.typeof(cache).mat.varying
    return out
got = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=cache, out_specs=batch))(placed[3])
want = np.concatenate([attend(arguments[3][:, b : b + 1]) for b in range(2)])
np.testing.assert_array_equal(got, want)
print("equal")
"""


def test_shard_map_over_the_batch(rng, tmp_path):
    here = pathlib.Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = dict(
        os.environ,
        PYTHONPATH=paths,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    run = subprocess.run(
        [sys.executable, "-c", SHARDED.format(seed=rng.integers(2**32))],
        env=environment,
        cwd=tmp_path,  # started in the source folder, Python would import that instead of the installed package
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert run.stdout.strip() == "equal", run.stderr


def test_a_traced_layer_equals_a_python_one(rng):
    query, cache, lengths, tree = random_attention(
        rng, np.float32, batch=1, budget=8, heads=2, rows=30
    )
    attend = jax.jit(
        lambda layer: ddtree_jax.verify_attn(query, cache, lengths, tree, scale=0.1, layer=layer)
    )
    for layer in range(2):
        want = ddtree_jax.verify_attn(query, cache, lengths, tree, scale=0.1, layer=layer)
        np.testing.assert_array_equal(attend(layer), want)


def test_an_empty_batch_gives_empty_results():
    log_probs, token_ids = ddtree_jax.draft_topk(np.zeros((0, L, V), np.float32), K)
    tree = ddtree_jax.tree_build(log_probs, token_ids, np.zeros(0, np.int32), budget=BUDGET)
    path = ddtree_jax.tree_accept(tree, np.zeros((0, N), np.int32))
    assert tree.ancestors.shape == (0, N, 1) and path.nodes.shape == (0, L + 1)
    cache, lengths = jnp.zeros((1, 0, S, 576)), np.zeros(0, np.int32)
    cache = ddtree_jax.append_latents(cache, np.zeros((0, N, 576), np.float32), lengths, layer=0)
    query = np.zeros((0, N, H, 576), np.float32)
    mixed = ddtree_jax.verify_attn(query, cache, lengths, tree, scale=1.0, layer=0)
    assert mixed.shape == (0, N, H, 512)
    assert ddtree_jax.commit_path(cache, path, lengths).shape == cache.shape


def _of_floats(name):
    """A kernel as a function of one array of floats, to numbers."""
    tree, i32 = a_tree(), functools.partial(zeros, dtype=I32)
    path = ddtree_jax.tree_accept(tree, i32(1, 5))
    cache, rows, lengths = zeros(1, 1, 9, 576), zeros(1, 5, 576), i32(1)
    packed = i32(2, 64, 4), jnp.zeros((2, 64, 1), jnp.bfloat16), i32(2, 32, 4)
    scales = jnp.zeros((2, 32, 1), jnp.bfloat16)
    return {
        "draft_topk": lambda x: ddtree_jax.draft_topk(x + zeros(1, 2, 9), 2)[0],
        "tree_build": lambda x: (
            ddtree_jax.tree_build(x + zeros(1, 4, 3), i32(1, 4, 3), i32(1), budget=4).log_probs
        ),
        "append_latents": lambda x: ddtree_jax.append_latents(cache, x + rows, lengths, layer=0),
        "verify_attn": lambda x: ddtree_jax.verify_attn(
            x + zeros(1, 5, 2, 576), cache, lengths, tree, scale=0.1, layer=0
        ),
        "commit_path": lambda x: ddtree_jax.commit_path(x + cache, path, lengths),
        "expert_mlp": lambda x: ddtree_jax.expert_mlp(
            x + zeros(3, 32), i32(3, 1), zeros(3, 1), *packed, scales
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["draft_topk", "tree_build", "append_latents", "verify_attn", "commit_path", "expert_mlp"],
)
def test_a_gradient_is_refused_with_the_remedy(name):
    kernel = _of_floats(name)
    for call in (kernel, jax.jit(kernel)):
        with pytest.raises(NotImplementedError, match=f"^{name} has no derivative: .* plain pass"):
            jax.eval_shape(jax.grad(lambda x, call=call: call(x).sum()), 0.0)
        with pytest.raises(NotImplementedError, match=f"^{name} has no derivative"):
            jax.eval_shape(lambda x, call=call: jax.jvp(call, (x,), (x,)), 0.0)
        # What asks for no derivative of it is served.
        still = jax.grad(lambda x, call=call: x + call(jax.lax.stop_gradient(x)).sum())
        assert jax.eval_shape(still, 0.0).shape == ()


I32, F32, E4M3 = np.int32, np.float32, ml_dtypes.float8_e4m3fn


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


def a_tree(batch=1, budget=4):
    return ddtree_jax.chain_tree(zeros(batch, budget + 1, dtype=I32), np.full(batch, 1, I32))


def attend(
    query=(1, 5, 2, 576),
    cache=(2, 1, 20, 576),
    layer=0,
    dtype=F32,
    lengths=I32,
    tree=None,
    scale=1.0,
    path="auto",
    cache_dtype=F32,
    cache_scale=None,
):
    return ddtree_jax.verify_attn(
        zeros(*query, dtype=dtype),
        zeros(*cache, dtype=cache_dtype),
        zeros(1, dtype=lengths),
        tree or a_tree(),
        scale=scale,
        layer=layer,
        path=path,
        cache_scale=cache_scale,
    )


def build(
    log_probs=(1, 3, 4), ids=(1, 3, 4), roots=(1,), budget=4, dtype=F32, ids_dtype=I32, **more
):
    return ddtree_jax.tree_build(
        zeros(*log_probs, dtype=dtype),
        zeros(*ids, dtype=ids_dtype),
        zeros(*roots, dtype=I32),
        budget=budget,
        **more,
    )


def append(latents=(1, 3, 576), dtype=F32, lengths=(1,), cache_dtype=F32, layer=0, **more):
    return ddtree_jax.append_latents(
        zeros(2, 1, 9, 576, dtype=cache_dtype),
        zeros(*latents, dtype=dtype),
        zeros(*lengths, dtype=I32),
        layer=layer,
        **more,
    )


def commit(nodes=(1, 4), dtype=I32):
    path = ddtree_jax.AcceptedPath(
        zeros(*nodes, dtype=dtype),
        zeros(*nodes, dtype=I32),
        zeros(1, dtype=I32),
        zeros(1, dtype=bool),
    )
    return ddtree_jax.commit_path(zeros(2, 1, 9, 576), path, zeros(1, dtype=I32))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ddtree_jax.draft_topk(zeros(2, 9), 3), ValueError, ["logits", "[2, 9]"]),
        (
            lambda: ddtree_jax.draft_topk(zeros(1, 2, 9, dtype=I32), 3),
            ValueError,
            ["logits", "int32"],
        ),
        (lambda: ddtree_jax.draft_topk(zeros(1, 2, 9), 10), ValueError, ["k", "9", "10"]),
        (lambda: ddtree_jax.draft_topk(zeros(1, 2, 9), 0), ValueError, ["k", "0"]),
        (lambda: ddtree_jax.draft_topk(zeros(1, 2, 900), 257), ValueError, ["k", "256", "257"]),
        (lambda: ddtree_jax.draft_topk(zeros(1, 2, 9), 2.0), ValueError, ["k", "2.0"]),
        (lambda: ddtree_jax.draft_topk(zeros(1, 2, 0), 1), ValueError, ["logits", "one token"]),
        (
            lambda: ddtree_jax.draft_topk([[1.0], [2.0, 3.0]], 1),
            ValueError,
            ["logits must be an array of float32 or bfloat16"],
        ),
        (lambda: ddtree_jax.draft_topk("x", 1), ValueError, ["logits must be float32", "str"]),
        (lambda: build(budget=jnp.float32(2)), ValueError, ["budget must be a whole number"]),
        (lambda: build(keep_spine="no"), ValueError, ["keep_spine must be True or False", "'no'"]),
        (
            lambda: build(budgets=np.array([2**32 + 3])),
            ValueError,
            ["budgets must lie in -2147483648 .. 2147483647 (int32)", "4294967299"],
        ),
        (lambda: build(budgets=[-(2**31) - 1]), ValueError, ["budgets", "-2147483649"]),
        (
            lambda: attend(cache=(0, 1, 20, 576), layer=jnp.int32(0)),
            ValueError,
            ["cache must have at least one layer"],
        ),
        (lambda: attend(cache=(0, 1, 20, 576)), ValueError, ["cache must have at least one layer"]),
        (lambda: attend(query=(1, 0, 2, 576)), ValueError, ["query's nodes N", "1 .. 257", "0"]),
        (lambda: append(latents=(1, 0, 576)), ValueError, ["latents", "at least one"]),
        (lambda: append(layer=1.0), ValueError, ["layer must be a whole number", "1.0"]),
        (lambda: commit(nodes=(1, 0)), ValueError, ["path.nodes", "at least"]),
        (
            lambda: ddtree_jax.chain_tree(zeros(1, 0, dtype=I32), zeros(1, dtype=I32)),
            ValueError,
            ["tokens' nodes N", "1 .. 257", "0"],
        ),
        (
            lambda: ddtree_jax.tree_accept(a_tree(), zeros(1, 5, dtype=I32), stop_tokens=(2**31,)),
            ValueError,
            ["a stop token", "2147483648"],
        ),
        (lambda: build(budget=257), ValueError, ["budget", "256", "257"]),
        (lambda: build(budget=-1), ValueError, ["budget", "-1"]),
        (lambda: build(budget=True), ValueError, ["budget", "True"]),
        (lambda: build(ids=(1, 3, 5)), ValueError, ["token_ids", "[1, 3, 4]", "[1, 3, 5]"]),
        (lambda: build(roots=(2,)), ValueError, ["root_tokens", "[1]", "[2]"]),
        (lambda: build(dtype=np.float16), ValueError, ["log_probs", "float32", "float16"]),
        (lambda: build(ids_dtype=np.uint32), ValueError, ["token_ids", "int32", "uint32"]),
        (lambda: build((1, 32, 4), (1, 32, 4)), ValueError, ["L", "31", "32"]),
        (lambda: build((1, 0, 4), (1, 0, 4)), ValueError, ["L", "0"]),
        (lambda: build(budgets=zeros(2, dtype=I32)), ValueError, ["budgets", "[2]"]),
        (lambda: build(budgets=zeros(1)), ValueError, ["budgets", "float32"]),
        (lambda: attend(query=(1, 5, 2, 512)), ValueError, ["query", "576", "512"]),
        (lambda: attend(cache=(2, 2, 20, 576)), ValueError, ["cache", "[2, 2, 20, 576]"]),
        (lambda: attend(cache=(2, 1, 4, 576)), ValueError, ["cache", "4", "5"]),
        (lambda: attend(scale="x"), ValueError, ["scale", "x"]),
        (lambda: attend(path="wide"), ValueError, ["path", "portable", "hopper", "'wide'"]),
        (lambda: attend(dtype=np.float16), ValueError, ["query", "float16"]),
        (lambda: attend(dtype=jnp.bfloat16), ValueError, ["cache", "bfloat16", "float32"]),
        (
            lambda: attend(cache_scale=zeros(2)),
            ValueError,
            ["cache_scale is for a float8_e4m3fn cache", "float32"],
        ),
        (
            lambda: attend(cache_dtype=E4M3, cache_scale=zeros(1)),
            ValueError,
            ["cache_scale", "[2]", "[1]"],
        ),
        (
            lambda: attend(cache_dtype=E4M3, cache_scale=zeros(2, dtype=I32)),
            ValueError,
            ["cache_scale must be float32, not int32"],
        ),
        (lambda: attend(dtype=E4M3, cache_dtype=E4M3), ValueError, ["query", "float8_e4m3fn"]),
        (lambda: append(dtype=E4M3, cache_dtype=E4M3), ValueError, ["latents", "float8_e4m3fn"]),
        (
            lambda: append(cache_scale=zeros(2)),
            ValueError,
            ["cache_scale is for a float8_e4m3fn cache"],
        ),
        (lambda: attend(lengths=np.int16), ValueError, ["lengths", "int16"]),
        (lambda: attend(layer=2), ValueError, ["layer", "0 .. 1", "2"]),
        (lambda: attend(layer=jnp.zeros(1, I32)), ValueError, ["layer", "[1]"]),
        (lambda: attend(tree=a_tree(budget=5)), ValueError, ["tree.ancestors", "[1, 6, 1]"]),
        (lambda: append(latents=(2, 3, 576)), ValueError, ["latents", "[2, 3, 576]"]),
        (lambda: append(dtype=jnp.bfloat16), ValueError, ["latents", "float32", "bfloat16"]),
        (lambda: append(lengths=(1, 1)), ValueError, ["lengths", "[1, 1]"]),
        (lambda: append(layer=-1), ValueError, ["layer", "-1"]),
        (lambda: commit(nodes=(2, 4)), ValueError, ["path.nodes", "[2, 4]"]),
        (lambda: commit(dtype=np.uint32), ValueError, ["path.nodes", "uint32"]),
        (
            lambda: ddtree_jax.tree_accept(a_tree(), zeros(1, 6, dtype=I32)),
            ValueError,
            ["tree.tokens", "[1, 6]", "[1, 5]"],
        ),
        (
            lambda: ddtree_jax.tree_accept(a_tree(), zeros(1, 5)),
            ValueError,
            ["target_tokens", "float32"],
        ),
        (
            lambda: ddtree_jax.tree_accept(
                a_tree(), zeros(1, 5, dtype=I32), max_new=zeros(2, dtype=I32)
            ),
            ValueError,
            ["max_new", "[2]"],
        ),
        *(
            (
                lambda wrong=wrong: append(
                    cache_dtype=E4M3, cache_scale=np.array([1, wrong], np.float32)
                ),
                ValueError,
                ["cache_scale must be finite and at least 1.2e-38", "[1.0, "],
            )
            for wrong in (0.0, -1.0, np.inf, np.nan, 1e-39)
        ),
        (
            lambda: ddtree_jax.chain_tree(zeros(1, 258, dtype=I32), zeros(1, dtype=I32)),
            ValueError,
            ["257"],
        ),
    ],
)
def test_misuse_says_what_was_expected_and_what_was_given(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_64_bit_integers_that_fit_are_taken():
    tree = build(budgets=np.array([2], np.int64))
    assert np.asarray(tree.num_nodes).tolist() == [3]
    wide = dataclasses.replace(tree, tokens=np.asarray(tree.tokens, np.int64))
    path = ddtree_jax.tree_accept(wide, np.zeros((1, 5), np.int64))
    assert np.asarray(path.num_emitted).tolist() == [2 + 1]


def test_misuse_is_found_while_tracing():
    with pytest.raises(
        ValueError, match="k must be a whole number, not a traced array: make it static"
    ):
        jax.jit(ddtree_jax.draft_topk)(zeros(1, 2, 3), 2)
    with pytest.raises(ValueError, match="budget"):
        jax.eval_shape(
            lambda x: ddtree_jax.tree_build(
                x, zeros(1, 2, 3, dtype=I32), zeros(1, dtype=I32), budget=300
            ),
            zeros(1, 2, 3),
        )


@pytest.mark.parametrize(
    ("target", "operands", "results", "words"),
    [
        ("draft_topk", [zeros(4, dtype=F32)], [(4, 2), (4, 2)],
         "Wrong buffer rank: expected 2 but got 1"),
        ("draft_topk", [zeros(2, 9, dtype=I32)], [(2, 2), (2, 2)],
         "expected one of F32 BF16 but got S32"),
        ("append_latents", [zeros(1, 1, 9, 8), zeros(1, 3, 7), zeros(1, dtype=I32), zeros(dtype=I32), zeros(0)],
         [(1, 1, 9, 8)], "latents has the wrong shape"),
        ("append_latents", [zeros(1, 1, 9, 8), zeros(1, 3, 8), zeros(1, dtype=I32), zeros(dtype=I32), zeros(0)],
         [(1, 1, 9, 8)], "aliased"),
        ("append_latents", [zeros(1, 1, 9, 8), zeros(1, 3, 8), zeros(1, dtype=I32), zeros(dtype=I32), zeros(1)],
         [(1, 1, 9, 8)], "cache_scale is for a float8_e4m3fn cache"),
    ],
)  # fmt: skip
def test_handlers_check_calls_made_without_the_primitives(target, operands, results, words):
    dtypes = [F32, I32] if target == "draft_topk" else [F32]
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in zip(results, dtypes, strict=True)]
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.ffi.ffi_call(f"ddtree_{target}", shapes)(*operands))
    assert words in str(caught.value)
