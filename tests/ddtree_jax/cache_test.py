"""append_latents and commit_path against their oracles, and that both work in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import cache_copies
from primitive_checks import (
    CACHES,
    DTYPES,
    E4M3,
    check_append_latents,
    check_append_to_e4m3,
    check_commit_path,
)

import ddtree_jax


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("rows", "nodes", "width"), [(40, 17, 576), (5, 9, 576), (12, 3, 40)])
def test_append_latents(rng, kind, rows, nodes, width):
    dtype, cache_dtype = CACHES[kind]
    sizes = dict(layers=3, batch=4, rows=rows, nodes=nodes, width=width)
    check_append_latents(rng, dtype, cache_dtype=cache_dtype, **sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_e4m3_makes_of_every_number(rng, dtype):
    check_append_to_e4m3(rng, DTYPES[dtype])


@pytest.mark.parametrize("dtype", [*DTYPES.values(), E4M3], ids=str)
@pytest.mark.parametrize(("nodes", "depth", "width"), [(17, 7, 576), (4, 7, 576), (65, 31, 41)])
def test_commit_path(rng, dtype, nodes, depth, width):
    for _ in range(5):
        check_commit_path(
            rng, dtype, layers=3, batch=4, rows=70, nodes=nodes, depth=depth, width=width
        )


def test_a_long_path_moves_through_itself():
    # Each row is read before the move that overwrites it.
    cache = np.arange(60, dtype=np.float32)[None, None, :, None]
    nodes = np.arange(0, 32, dtype=np.int32)[None]
    nodes[0, 1:] += 1
    path = ddtree_jax.AcceptedPath(nodes, nodes, np.array([32], np.int32), np.array([False]))
    got = ddtree_jax.commit_path(cache, path, np.array([10], np.int32))[0, 0, :, 0]
    want = [*range(11), *range(12, 43), *range(42, 60)]
    np.testing.assert_array_equal(got, want)


def step(cache, latents, path, rounds):
    """`rounds` appends and commits of every layer in a loop."""
    layers = cache.shape[0]

    def layer(index, state):
        cache, lengths = state
        return ddtree_jax.append_latents(cache, latents, lengths, layer=index), lengths

    def round_(_, state):
        cache, lengths = jax.lax.fori_loop(0, layers, layer, state)
        return ddtree_jax.commit_path(cache, path, lengths), lengths + path.num_emitted

    lengths = jnp.zeros(cache.shape[1], jnp.int32)
    return jax.lax.fori_loop(0, rounds, round_, (cache, lengths))[0]


@pytest.mark.parametrize("kind", CACHES)
def test_donated_loop_works_in_place(rng, kind):
    dtype, cache_dtype = CACHES[kind]
    cache = jax.device_put(jnp.zeros((3, 2, 64, 576), cache_dtype))
    latents = rng.normal(size=(2, 5, 576)).astype(dtype)
    nodes = np.array([[0, 2, 4], [0, 1, -1]], np.int32)
    path = ddtree_jax.AcceptedPath(nodes, nodes, np.array([3, 2], np.int32), np.zeros(2, bool))
    compiled = jax.jit(step, donate_argnums=0).lower(cache, latents, path, 4).compile()
    assert not cache_copies(compiled.as_text(), cache, also=("convert",))

    pointer = cache.unsafe_buffer_pointer()
    got = compiled(cache, latents, path, 4)
    assert got.unsafe_buffer_pointer() == pointer
    assert cache.is_deleted()
    want = np.zeros((3, 2, 64, 576), cache_dtype)
    # Normal numbers: neither large nor on a tie that bfloat16 made.
    latents = latents.astype(cache_dtype)
    for b, taken in enumerate([[0, 2, 4], [0, 1]]):
        rows = np.concatenate([latents[b, taken]] * 4)
        want[:, b, : len(rows)] = rows
        # Past the committed rows, what the last round left behind.
        last = len(rows) - len(taken)
        want[:, b, last + len(taken) : last + 5] = latents[b, len(taken) :]
    np.testing.assert_array_equal(np.asarray(got), want)


def test_without_donation_the_argument_survives(rng):
    cache = jnp.asarray(rng.normal(size=(1, 1, 8, 576)), jnp.float32)
    before = np.array(cache)
    after = ddtree_jax.append_latents(
        cache, jnp.ones((1, 2, 576), jnp.float32), np.array([3], np.int32), layer=0
    )
    np.testing.assert_array_equal(cache, before)
    assert (np.asarray(after)[0, 0, 3:5] == 1).all()
