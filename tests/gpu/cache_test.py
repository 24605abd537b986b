"""append_latents and commit_path on the GPU against the NumPy oracles, and in place."""

import jax
import jax.numpy as jnp
import numpy as np
import primitive_checks as checks
import pytest

import ddtree_jax
from ddtree_jax import reference

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

DTYPES = [jnp.float32, jnp.bfloat16]
E4M3 = jnp.float8_e4m3fn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 7])
@pytest.mark.parametrize("layer", [-1, 0, 2, 3])
def test_append(rng, dtype, width, layer):
    layers, batch, rows, nodes = 3, 4, 40, 17
    cache = jnp.asarray(rng.standard_normal((layers, batch, rows, width)), dtype)
    latents = jnp.asarray(rng.standard_normal((batch, nodes, width)), dtype)
    lengths = np.array([0, rows - nodes, rows - 3, -5], np.int32)
    want = reference.append_latents(cache, latents, lengths, layer=layer)
    got = ddtree_jax.append_latents(cache, latents, lengths, layer=jnp.int32(layer))
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("cache_scale", [None, (1.0, 0.3, 7.0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 7])
@pytest.mark.parametrize("layer", [-1, 0, 2, 3])
def test_append_to_e4m3(rng, dtype, width, layer, cache_scale):
    layers, batch, rows, nodes = 3, 4, 40, 17
    cache = jnp.asarray(rng.standard_normal((layers, batch, rows, width)), E4M3)
    latents = jnp.asarray(rng.standard_normal((batch, nodes, width)), dtype)
    lengths = np.array([0, rows - nodes, rows - 3, -5], np.int32)
    scaled = {}
    if cache_scale is not None:
        scaled = {"cache_scale": np.asarray(cache_scale, np.float32)}
    want = reference.append_latents(cache, latents, lengths, layer=layer, **scaled)
    got = ddtree_jax.append_latents(cache, latents, lengths, layer=jnp.int32(layer), **scaled)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_what_e4m3_makes_of_every_number(rng, dtype):
    checks.check_append_to_e4m3(rng, checks.DTYPES[dtype])


@pytest.mark.parametrize("dtype", [*DTYPES, E4M3])
@pytest.mark.parametrize(("width", "path"), [(576, 8), (576, 32), (7, 8)])
def test_commit(rng, dtype, width, path):
    layers, batch, rows = 5, 8, 80
    cache = jnp.asarray(rng.standard_normal((layers, batch, rows, width)), dtype)
    counts = rng.integers(0, path + 1, batch, dtype=np.int32)
    nodes = np.full((batch, path), -1, np.int32)
    for b, count in enumerate(counts):
        nodes[b, :count] = np.sort(rng.choice(np.arange(1, 65), count, replace=False))
        nodes[b, : min(count, 1)] = 0
    lengths = np.array([0, 3, 15, 10, rows - 20, rows, -4, 1], np.int32)
    accepted = ddtree_jax.AcceptedPath(
        nodes=jnp.asarray(nodes),
        tokens=jnp.asarray(nodes),
        num_emitted=jnp.asarray(counts),
        finished=jnp.zeros(batch, bool),
    )
    want = reference.commit_path(cache, nodes, counts, lengths)
    got = ddtree_jax.commit_path(cache, accepted, lengths)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "bf16"), (E4M3, "f8e4m3fn")])
def test_in_place_in_a_loop(rng, dtype, name):
    cache = jnp.zeros((4, 2, 64, 576), dtype)
    latents = jnp.asarray(rng.standard_normal((2, 3, 576)), jnp.bfloat16)

    def run(cache, latents):
        def body(i, cache):
            lengths = jnp.full(2, 3 * i, jnp.int32)
            return ddtree_jax.append_latents(cache, latents, lengths, layer=i % 4)

        return jax.lax.fori_loop(0, 12, body, cache)

    step = jax.jit(run, donate_argnums=0).lower(cache, latents).compile()
    copies = [
        line
        for line in step.as_text().splitlines()
        if f"{name}[4,2,64,576]" in line and (" copy(" in line or " convert(" in line)
    ]
    assert not copies
    before = cache.unsafe_buffer_pointer()
    cache = step(cache, latents)
    assert cache.unsafe_buffer_pointer() == before
    want = np.asarray(latents).astype(dtype)  # normal numbers: none of them saturates
    np.testing.assert_array_equal(np.asarray(cache)[3, :, 33:36], want)
