"""The CUDA kernel of expert_mlp against the float64 oracle, whatever the routing, and at K2.6's widths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_checks import KINDS, check_expert_mlp, error_of, random_routing, random_weights

from ddtree_jax import expert_mlp
from ddtree_jax.reference.expert_mlp import expert_mlp as oracle

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
DTYPES = [jnp.float32, jnp.bfloat16]
kernel = functools.partial(expert_mlp, cuda_kernel=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 17, 33, 65, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_oracle(rng, kind, tokens, dtype):
    """Few and many tokens an expert; widths that fill tasks and stages, and that do not."""
    hidden, inner = int(rng.choice([32, 96, 256, 1024])), int(rng.choice([32, 64, 160]))
    experts = int(rng.choice([3, 5, 40]))
    check_expert_mlp(
        rng,
        kind=kind,
        tokens=tokens,
        dtype=dtype,
        experts=experts,
        hidden=hidden,
        inner=inner,
        cuda_kernel=True,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_an_expert(rng, dtype):
    x = jnp.asarray(rng.normal(size=(40, 256)), dtype)
    ids = rng.permutation(40).astype(np.int32)[:, None]
    shares = rng.random((40, 1)).astype(np.float32)
    weights = random_weights(rng, 40, 256, 128)
    want = oracle(np.asarray(x, np.float64), ids, shares, *map(np.asarray, weights))
    error = error_of(kernel(x, ids, shares, *weights), want)
    assert error < (2e-6 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others_nor_on_the_run(rng, dtype):
    weights = random_weights(rng, 6, 512, 96)
    x = jnp.asarray(rng.normal(size=(100, 512)), dtype)
    ids = random_routing(rng, "random", 100, 2, 6)
    shares = rng.random((100, 2)).astype(np.float32)
    together = np.asarray(kernel(x, ids, shares, *weights))
    for _ in range(5):
        np.testing.assert_array_equal(together, np.asarray(kernel(x, ids, shares, *weights)))
    for t in (0, 16, 99):
        alone = kernel(x[t : t + 1], ids[t : t + 1], shares[t : t + 1], *weights)
        np.testing.assert_array_equal(together[t], np.asarray(alone)[0])
    poisoned = np.asarray(kernel(x.at[5].set(np.nan), ids, shares, *weights))
    others = np.arange(100) != 5
    np.testing.assert_array_equal(together[others], poisoned[others])
    assert np.isnan(np.asarray(poisoned[5], np.float32)).all()


@pytest.fixture(scope="module")
def k26():
    """Random experts of Kimi K2.6's widths: 9.5 GB, made on the device."""

    def words(seed, *shape):
        bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint32)
        return jax.lax.bitcast_convert_type(bits, jnp.int32)

    def scales(seed, *shape):
        return jax.random.uniform(jax.random.key(seed), shape, jnp.bfloat16, 0.001, 0.01)

    seed = int(np.random.SeedSequence().entropy % 2**31)
    print("seed", seed)
    return (
        words(seed, 384, 4096, 896),
        scales(seed + 1, 384, 4096, 224),
        words(seed + 2, 384, 7168, 256),
        scales(seed + 3, 384, 7168, 64),
    )


@pytest.mark.parametrize("tokens", [1, 8, 17, 33, 65, 512])
def test_k26_widths(rng, k26, tokens):
    x = jnp.asarray(rng.normal(size=(tokens, 7168)), jnp.bfloat16)
    ids = random_routing(rng, "random", tokens, 8, 384)
    shares = rng.random((tokens, 8)).astype(np.float32)
    got = np.asarray(jax.jit(kernel)(x, ids, shares, *k26))
    t = int(rng.integers(tokens))  # The oracle's weights of all experts are 135 GB of float64.
    chosen = [np.asarray(each[ids[t]]) for each in k26]
    want = oracle(
        np.asarray(x[t : t + 1], np.float64), np.arange(8)[None], shares[t : t + 1], *chosen
    )
    assert error_of(got[t : t + 1], want) < 1e-2
    alone = kernel(x[t : t + 1], ids[t : t + 1], shares[t : t + 1], *k26)
    np.testing.assert_array_equal(got[t], np.asarray(alone)[0])


@pytest.mark.parametrize("tokens", [17, 512])
def test_k26_widths_all_on_one_expert(rng, k26, tokens):
    x = jnp.asarray(rng.normal(size=(tokens, 7168)), jnp.bfloat16)
    ids, shares = np.full((tokens, 1), 383, np.int32), rng.random((tokens, 1)).astype(np.float32)
    got = jax.jit(kernel)(x, ids, shares, *k26)
    rows = rng.choice(tokens, size=4, replace=False)
    last = [np.asarray(each[383:]) for each in k26]
    want = oracle(np.asarray(x[rows], np.float64), np.zeros((4, 1), np.int32), shares[rows], *last)
    assert error_of(np.asarray(got)[rows], want) < 1e-2
