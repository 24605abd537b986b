"""verify_attn on the GPU against float64 attention."""

import jax
import jax.numpy as jnp
import numpy as np
import primitive_checks as checks
import pytest

import ddtree_jax

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

_ON_HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
# float32 has one kernel, bfloat16 one that runs everywhere and one for Hopper.
KERNELS = [
    pytest.param(checks.DTYPES["float32"], "auto", id="float32"),
    pytest.param(checks.DTYPES["bfloat16"], "portable", id="portable"),
    pytest.param(
        checks.DTYPES["bfloat16"],
        "hopper",
        id="hopper",
        marks=pytest.mark.skipif(not _ON_HOPPER, reason="needs sm_90"),
    ),
]
SCALE = 192**-0.5


@pytest.mark.parametrize(("dtype", "path"), KERNELS)
@pytest.mark.parametrize(
    ("batch", "budget", "heads", "rows"),
    [(1, 0, 1, 40), (3, 16, 8, 300), (2, 64, 5, 700), (2, 32, 16, 1500), (2, 256, 3, 600)],
)
def test_random_trees(rng, dtype, path, batch, budget, heads, rows):
    inputs = checks.random_attention(
        rng, dtype, batch=batch, budget=budget, heads=heads, rows=rows, depth=8
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=int(rng.integers(0, 2)), path=path)


@pytest.mark.parametrize(("dtype", "path"), KERNELS)
def test_ragged_lengths(rng, dtype, path):
    """From no prefix to no cache row left behind the tree, and lengths out of range."""
    lengths = [0, 1, 15, 31, 32, 33, 64, 400, 500 - 17, 0]
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=len(lengths), budget=16, heads=8, rows=500, lengths=lengths
    )
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=1, path=path)
    out_of_range = lengths.copy()
    out_of_range[0], out_of_range[8] = -3, 10_000
    for layer in (-1, 2):
        checks.check_verify_attn(
            query, cache, out_of_range, tree, scale=SCALE, layer=layer, path=path
        )


@pytest.mark.parametrize(("dtype", "path"), KERNELS)
def test_a_tile_cut_between_blocks(rng, dtype, path):
    """One request with a long prefix: every tile's steps are spread over many blocks."""
    inputs = checks.random_attention(
        rng, dtype, batch=1, budget=16, heads=8, rows=5000, layers=1, lengths=[4900]
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path"), KERNELS)
@pytest.mark.parametrize("budget", [16, 64, 256])
def test_zero_query_is_the_mean_of_the_visible_rows(rng, dtype, path, budget):
    """Every row that may be seen weighs the same, so that one row too many or too few shows."""
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=2, budget=budget, heads=4, rows=budget + 40, lengths=[0, 33]
    )
    checks.check_verify_attn(
        np.zeros_like(query), cache, lengths, tree, scale=SCALE, layer=0, path=path
    )


@pytest.mark.parametrize(("dtype", "path"), KERNELS)
def test_nan_stays_with_those_that_see_it(rng, dtype, path):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=3, budget=16, heads=8, rows=200, layers=1
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


@pytest.mark.parametrize(("dtype", "path"), KERNELS[1:])
def test_kimi_heads_at_long_context(rng, dtype, path):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=2, budget=16, heads=64, rows=2500, layers=1
    )
    checks.check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path"), KERNELS[1:])
def test_prefix_of_131072(rng, dtype, path):
    inputs = checks.random_attention(
        rng,
        dtype,
        batch=1,
        budget=16,
        heads=2,
        rows=131072 + 17,
        layers=1,
        lengths=[131072],
    )
    checks.check_verify_attn(*inputs, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path"), KERNELS)
def test_batch_of_64(rng, dtype, path):
    inputs = checks.random_attention(rng, dtype, batch=64, budget=32, heads=4, rows=150, layers=1)
    checks.check_verify_attn(*inputs, scale=SCALE, layer=0, path=path)


@pytest.mark.parametrize(("dtype", "path"), KERNELS[1:])
def test_the_layer_may_be_a_loop_variable(rng, dtype, path):
    query, cache, lengths, tree = checks.random_attention(
        rng, dtype, batch=2, budget=16, heads=8, rows=100, layers=3
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
