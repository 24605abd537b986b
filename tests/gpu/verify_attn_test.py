"""verify_attn on the GPU against float64 attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import primitive_checks as checks
import pytest

import ddtree_jax

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

_ON_HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
# float32 has one kernel, bfloat16 one that runs everywhere and those for Hopper.
_F32, _BF16 = checks.DTYPES.values()
_needs_hopper = pytest.mark.skipif(not _ON_HOPPER, reason="needs sm_90")
KERNELS = [
    pytest.param(_F32, "auto", None, id="float32"),
    pytest.param(_F32, "auto", checks.E4M3, id="float32-e4m3"),
    pytest.param(_BF16, "portable", None, id="portable"),
    pytest.param(_BF16, "portable", checks.E4M3, id="portable-e4m3"),
    pytest.param(_BF16, "hopper", None, id="hopper", marks=_needs_hopper),
    pytest.param(_BF16, "hopper", checks.E4M3, id="hopper-e4m3", marks=_needs_hopper),
]
SCALE = 192**-0.5


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
@pytest.mark.parametrize(
    ("batch", "budget", "heads", "rows"),
    [(1, 0, 1, 40), (3, 16, 8, 300), (2, 64, 5, 700), (2, 32, 16, 1500), (2, 256, 3, 600)],
)
def test_random_trees(rng, dtype, path, cache_dtype, batch, budget, heads, rows):
    inputs = checks.random_attention(
        rng,
        dtype,
        batch=batch,
        budget=budget,
        heads=heads,
        rows=rows,
        depth=8,
        cache_dtype=cache_dtype,
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=int(rng.integers(0, 2)), path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
def test_ragged_lengths(rng, dtype, path, cache_dtype):
    """From no prefix to no cache row left behind the tree, and lengths out of range."""
    lengths = [0, 1, 15, 31, 32, 33, 64, 400, 500 - 17, 0]
    query, cache, lengths, tree = checks.random_attention(
        rng,
        dtype,
        batch=len(lengths),
        budget=16,
        heads=8,
        rows=500,
        lengths=lengths,
        cache_dtype=cache_dtype,
    )
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=1, path=path)
    out_of_range = lengths.copy()
    out_of_range[0], out_of_range[8] = -3, 10_000
    for layer in (-1, 2):
        checks.check_verify_attn(
            query, cache, out_of_range, tree, scale=SCALE, layer=layer, path=path
        )


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
def test_a_tile_cut_between_blocks(rng, dtype, path, cache_dtype):
    """One request with a long prefix: every tile's steps are spread over many blocks."""
    inputs = checks.random_attention(
        rng,
        dtype,
        batch=1,
        budget=16,
        heads=8,
        rows=5000,
        layers=1,
        lengths=[4900],
        cache_dtype=cache_dtype,
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS[2:])
@pytest.mark.parametrize(
    ("sizes", "num_nodes"),
    [
        (dict(batch=3, budget=32, heads=64, rows=2000, lengths=[1967, 1960, 1953]), [33, 30, 7]),
        (dict(batch=48, budget=16, heads=8, rows=2550, lengths=range(100, 2500, 50)), 17),
        (dict(batch=20, budget=16, heads=8, rows=6100, lengths=[6000, 50, 50, 50, 50] * 4), 17),
        (dict(batch=8, budget=16, heads=64, rows=1050, lengths=[1000] * 8), 17),
        (dict(batch=8, budget=24, heads=64, rows=1050, lengths=[990] * 8), 25),
        (dict(batch=64, budget=64, heads=64, rows=100), None),
    ],
    ids=["runs", "columns", "columns of many parts", "tiles then items", "tiles then runs", "many"],
)
def test_ways_to_share_work_out(rng, dtype, path, cache_dtype, sizes, num_nodes):
    """The ways of `verify_plan.h` that leave something to merge, by what 132 processors make of these sizes.

    `tests/ffi/plan_test.cu` asserts that they do.
    """
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, **sizes, layers=1, cache_dtype=cache_dtype, full=num_nodes is not None
    )
    if num_nodes is not None:
        nodes = np.broadcast_to(np.int32(num_nodes), lengths.shape).copy()
        tree = dataclasses.replace(tree, num_nodes=nodes)
        for request, count in enumerate(nodes):
            query[request, count:] = np.nan
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0, path=path)


# Whether tiles get clusters of blocks, or all blocks share them and merge, is decided by the cache's room; requests of
# up to 32 query rows have a kernel of their own.
@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS[2:])
@pytest.mark.parametrize("room", [0, 12_000], ids=["clusters", "merge"])
@pytest.mark.parametrize(
    ("nodes", "heads", "lengths"),
    [
        (1, 1, [0, 1, 63, 64]),
        (1, 16, [1100, 0, 64, 700]),
        (2, 8, [47, 48, 49, 1200]),
        (17, 1, [46, 47, 48, 900]),
        (4, 8, [0, 1023]),
        (5, 5, [300]),
        (3, 11, [59, 60, 61, 62]),
        (2, 48, [1500]),
        (17, 16, [2048]),
        (33, 8, [31, 1000]),
        (64, 1, [0, 1, 64, 65, 800]),
        (64, 3, [640]),
    ],
)
def test_few_tiles(rng, dtype, path, cache_dtype, room, nodes, heads, lengths):
    query, cache, lengths, tree = checks.random_attention(
        rng,
        dtype,
        batch=len(lengths),
        budget=nodes - 1,
        heads=heads,
        rows=max(lengths) + nodes + room,
        layers=1,
        lengths=lengths,
        cache_dtype=cache_dtype,
    )
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0, path=path)
    # Scores so large that blocks differ in their greatest by hundreds of powers of two.
    query = (query.astype(np.float32) * 16).astype(dtype)
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
@pytest.mark.parametrize("all_of_them", [False, True])
def test_requests_without_a_node(rng, dtype, path, cache_dtype, all_of_them):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=4, budget=16, heads=8, rows=300, layers=1, cache_dtype=cache_dtype
    )
    nodes = np.zeros(4, np.int32) if all_of_them else np.asarray(tree.num_nodes) * [1, 0, 1, 0]
    tree = dataclasses.replace(tree, num_nodes=nodes.astype(np.int32))
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
@pytest.mark.parametrize("budget", [16, 64, 256])
def test_zero_query_is_the_mean_of_the_visible_rows(rng, dtype, path, cache_dtype, budget):
    """Every row that may be seen weighs the same, so that one row too many or too few shows."""
    query, cache, lengths, tree = checks.random_attention(
        rng,
        dtype,
        batch=2,
        budget=budget,
        heads=4,
        rows=budget + 40,
        lengths=[0, 33],
        cache_dtype=cache_dtype,
    )
    checks.check_verify_attn(
        np.zeros_like(query), cache, lengths, tree, scale=SCALE, layer=0, path=path
    )


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
def test_nan_stays_with_those_that_see_it(rng, dtype, path, cache_dtype):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=3, budget=16, heads=8, rows=200, layers=1, cache_dtype=cache_dtype
    )
    run = jax.jit(ddtree_jax.verify_attn, static_argnames=("scale", "path"))
    clean = np.asarray(
        run(query, cache, lengths, tree, scale=SCALE, layer=0, path=path), np.float32
    )
    count = int(tree.num_nodes[0])
    cache[0, 0, lengths[0] + count - 1, 3] = np.nan
    cache[0, 0, lengths[0] + count :] = np.inf
    cache[0, 1, : lengths[1] + 1] = np.nan
    got = np.asarray(run(query, cache, lengths, tree, scale=SCALE, layer=0, path=path), np.float32)
    word, bit = divmod(count - 1, 32)
    sees = np.asarray(tree.ancestors)[0, :count, word] >> np.uint32(bit) & 1 == 1
    assert np.isnan(got[0, :count][sees]).all()
    np.testing.assert_array_equal(got[0, :count][~sees], clean[0, :count][~sees])
    assert np.isnan(got[1, : tree.num_nodes[1]]).all()
    np.testing.assert_array_equal(got[2], clean[2])


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS[2:])
def test_kimi_heads_at_long_context(rng, dtype, path, cache_dtype):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=2, budget=16, heads=64, rows=2500, layers=1, cache_dtype=cache_dtype
    )
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS[2:])
def test_prefix_of_131072(rng, dtype, path, cache_dtype):
    inputs = checks.random_attention(
        rng,
        dtype,
        batch=1,
        budget=16,
        heads=2,
        rows=131072 + 17,
        layers=1,
        lengths=[131072],
        cache_dtype=cache_dtype,
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS)
def test_batch_of_64(rng, dtype, path, cache_dtype):
    inputs = checks.random_attention(
        rng, dtype, batch=64, budget=32, heads=4, rows=150, layers=1, cache_dtype=cache_dtype
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), KERNELS[2:])
def test_the_layer_may_be_a_loop_variable(rng, dtype, path, cache_dtype):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=2, budget=16, heads=8, rows=100, layers=3, cache_dtype=cache_dtype
    )
    cache = jnp.asarray(cache)

    def body(layer, out):
        return out.at[layer].set(
            ddtree_jax.verify_attn(query, cache, lengths, tree, scale=SCALE, layer=layer, path=path)
        )

    shape = (3, *query.shape[:3], 512)
    loop = jax.jit(lambda: jax.lax.fori_loop(0, 3, body, jnp.zeros(shape, query.dtype)))()
    for layer in range(3):
        want = ddtree_jax.verify_attn(
            query, cache, lengths, tree, scale=SCALE, layer=layer, path=path
        )
        np.testing.assert_array_equal(np.asarray(loop[layer]), np.asarray(want))


E4M3_KERNELS = [kernel for kernel in KERNELS if kernel.values[2] == checks.E4M3]


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), E4M3_KERNELS)
def test_all_bytes_of_an_e4m3_cache_convert_exactly(dtype, path, cache_dtype):
    checks.check_e4m3_bytes(dtype, path=path)


@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), E4M3_KERNELS)
@pytest.mark.parametrize(
    ("batch", "budget", "heads", "rows"), [(2, 16, 64, 2500), (1, 16, 8, 5000), (3, 64, 8, 300)]
)
def test_scales_of_an_e4m3_cache(rng, dtype, path, cache_dtype, batch, budget, heads, rows):
    """Layers of their own scale, in tiles that one block does and in tiles that are cut between many."""
    scaled = {"cache_scale": checks.random_scale(rng, cache_dtype, 2)}
    sizes = dict(batch=batch, budget=budget, heads=heads, rows=rows, depth=8)
    inputs = checks.random_attention(rng, dtype, **sizes, cache_dtype=cache_dtype, **scaled)
    for layer in range(2):
        checks.check_verify_attn(*inputs, scale=SCALE, layer=layer, path=path, **scaled)


@pytest.mark.parametrize("rows", [120, 192, 230])
@pytest.mark.parametrize("prefix", [31, 32, 33, 63, 64, 65, 95, 97, 116])
@pytest.mark.parametrize(("dtype", "path", "cache_dtype"), E4M3_KERNELS)
def test_few_steps_of_an_e4m3_cache(rng, dtype, path, cache_dtype, prefix, rows):
    """One to four steps of the portable kernel, one or two of Hopper's; caches end in a step or after one."""
    inputs = checks.random_attention(
        rng, dtype, batch=1, budget=3, heads=8, rows=rows, lengths=[prefix], cache_dtype=cache_dtype
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=int(rng.integers(0, 2)), path=path)
