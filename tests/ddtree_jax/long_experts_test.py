"""Packed experts by ragged products against the float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from expert_checks import KINDS, error_of, random_routing, random_shares, random_weights

from ddtree_jax.long_experts import long_expert_mlp
from ddtree_jax.reference.expert_mlp import expert_mlp as oracle

mlp = quick_compile.jit(long_expert_mlp, static_argnames="experts_at_once")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_oracle(rng, kind, dtype):
    tokens, experts, hidden, inner, top_k = 70, 6, 96, 64, 3
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    ids = random_routing(rng, kind, tokens, top_k, experts)
    shares = random_shares(rng, ids, experts)
    weights = random_weights(rng, experts, hidden, inner)
    want = oracle(np.asarray(x, np.float64), ids, shares, *map(np.asarray, weights))
    together = int(rng.choice([1, 4, 32]))  # 1, 3 and all 6 in a turn of the loop
    got = mlp(x, ids, shares, *weights, experts_at_once=together)
    assert got.dtype == dtype
    assert error_of(got, want) < (2e-6 if dtype == jnp.float32 else 3e-2)


def test_nothing_to_do_and_wrong_arguments(rng):
    weights = random_weights(rng, 3, 64, 32)
    x = rng.normal(size=(4, 64)).astype(np.float32)
    none = np.zeros((4, 0), np.int32), np.zeros((4, 0), np.float32)
    np.testing.assert_array_equal(long_expert_mlp(x, *none, *weights), np.zeros((4, 64)))
    some = np.zeros((4, 1), np.int32), np.zeros((4, 1), np.float32)
    for wrong in (0, 2.5, None, "a"):
        with pytest.raises(ValueError, match="experts_at_once"):
            long_expert_mlp(x, *some, *weights, experts_at_once=wrong)
    with pytest.raises(ValueError, match="down_scale"):
        long_expert_mlp(x, *some, *weights[:3], weights[3].astype(jnp.float32))
