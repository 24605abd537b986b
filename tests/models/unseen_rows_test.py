"""What a row does not see never reaches it, NaN included: the models' plain paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import positions_of, random_drafter, random_target

from ddtree_jax import chain_tree
from ddtree_jax.models.moe import Experts, dense_expert_mlp


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_plain_pass_up_to_the_row_that_is_not_finite(rng, bad):
    target = random_target(rng)
    tokens = rng.permutation(49)[None, :12].astype(np.int32)
    plain = nnx.jit(lambda model, tokens: model(tokens, positions_of(tokens)))
    want = np.asarray(plain(target, tokens))
    assert np.all(np.isfinite(want))
    table = np.array(target.embed_tokens[...])
    table[tokens[0, 7]] = bad
    target.embed_tokens.set_value(jnp.asarray(table))
    got = np.asarray(plain(target, tokens))
    np.testing.assert_array_equal(got[:, :7], want[:, :7])
    assert np.all(np.isnan(got[:, 7:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_over_stale_rows(rng, dtype):
    """Rows past those in use hold what another request left there."""
    target = random_target(rng, dtype=jnp.dtype(dtype))
    drafter = random_drafter(rng, dtype=jnp.dtype(dtype))
    cache = drafter.init_cache(2, 20)
    features = jnp.asarray(rng.normal(size=(2, 9, 128)), dtype)
    counts = np.int32([9, 4])
    cache = drafter.extend(cache, features, np.int32([0, 0]), counts)
    draft = jax.jit(lambda *arguments: drafter.draft(target, *arguments))
    want = np.asarray(draft(cache, np.int32([1, 2]), counts))
    assert np.all(np.isfinite(want))
    unused = (np.arange(20) >= counts[:, None])[:, None, :, None]
    stale = jax.tree.map(lambda x: jnp.where(unused, jnp.nan, x), cache)
    np.testing.assert_array_equal(draft(stale, np.int32([1, 2]), counts), want)


def test_a_verify_pass_over_stale_rows(rng):
    target = random_target(rng)
    tokens = rng.integers(0, 49, (2, 6)).astype(np.int32)
    tree = chain_tree(tokens, np.int32([6, 3]))
    lengths = np.int32([0, 0])
    verify = jax.jit(lambda cache: target.verify(tree, cache, lengths)[0])
    want = np.asarray(verify(target.init_cache(2, 20)))
    got = np.asarray(verify(jnp.full_like(target.init_cache(2, 20), jnp.nan)))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1, :3], want[1, :3])


def test_an_expert_that_overflows_reaches_no_token_that_did_not_choose_it(rng):
    config = random_target(rng).config
    experts = Experts(config, param_dtype=jnp.float32, rngs=nnx.Rngs(0), experts="float")
    gate_up = np.array(rng.normal(size=experts.gate_up.shape), np.float32)
    x = rng.normal(size=(5, 64)).astype(np.float32)
    ids = rng.integers(1, 6, (5, 2)).astype(np.int32)
    ids[2, 1] = 0
    weights = np.ones((5, 2), np.float32)
    experts.gate_up.set_value(jnp.asarray(gate_up))
    want = np.asarray(dense_expert_mlp(x, ids, weights, experts))
    gate_up[0] = 3e38 * np.sign(gate_up[0])
    experts.gate_up.set_value(jnp.asarray(gate_up))
    got = np.asarray(dense_expert_mlp(x, ids, weights, experts))
    others = np.arange(5) != 2
    np.testing.assert_array_equal(got[others], want[others])
    assert not np.all(np.isfinite(got[2]))
