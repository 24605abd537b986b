"""Packed experts against the float64 oracle, whatever the routing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from expert_checks import KINDS, check_expert_mlp, error_of, random_routing, random_weights

from ddtree_jax import _ffi, expert_mlp, experts
from ddtree_jax.experts import _scan_over_experts

plain_expert_mlp = quick_compile.jit(_scan_over_experts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_oracle(rng, kind, tokens, dtype):
    hidden, inner = int(rng.choice([32, 96, 256])), int(rng.choice([32, 64]))
    operands, want = check_expert_mlp(
        rng, kind=kind, tokens=tokens, dtype=dtype, hidden=hidden, inner=inner
    )
    plain = plain_expert_mlp(*operands)[0]
    assert error_of(plain, want) < (2e-6 if dtype == jnp.float32 else 3e-2)


@pytest.mark.parametrize("tokens, top_k", [(0, 2), (3, 0)])
def test_nothing_to_do_gives_zeros(rng, tokens, top_k):
    x = rng.normal(size=(tokens, 64)).astype(np.float32)
    ids, shares = np.zeros((tokens, top_k), np.int32), np.zeros((tokens, top_k), np.float32)
    weights = random_weights(rng, 3, 64, 32)
    for out in (
        expert_mlp(x, ids, shares, *weights),
        _scan_over_experts(x, ids, shares, *weights)[0],
    ):
        np.testing.assert_array_equal(out, np.zeros((tokens, 64), np.float32))


def test_a_token_does_not_depend_on_the_others(rng):
    weights = random_weights(rng, 6, 64, 32)
    x = rng.normal(size=(33, 64)).astype(np.float32)
    ids = random_routing(rng, "random", 33, 2, 6)
    shares = rng.random((33, 2)).astype(np.float32)
    together = np.asarray(expert_mlp(x, ids, shares, *weights))
    for t in (0, 16, 32):
        alone = expert_mlp(x[t : t + 1], ids[t : t + 1], shares[t : t + 1], *weights)
        np.testing.assert_array_equal(together[t], alone[0])
    poisoned = x.copy()
    poisoned[5] = np.nan
    others = np.arange(33) != 5
    np.testing.assert_array_equal(
        together[others], np.asarray(expert_mlp(poisoned, ids, shares, *weights))[others]
    )


def test_vmap_and_jit(rng):
    weights = random_weights(rng, 4, 64, 32)
    x = jnp.asarray(rng.normal(size=(3, 5, 64)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 4, (3, 5, 2)), jnp.int32)
    shares = jnp.asarray(rng.random((3, 5, 2)), jnp.float32)

    def call(x, i, s):
        return expert_mlp(x, i, s, *weights)

    each = jnp.stack([call(*one) for one in zip(x, ids, shares, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(x, ids, shares), each)


@pytest.mark.parametrize("cuda_kernel", [None, False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_cuda_the_caller_chooses_between_kernel_and_plain_jax(rng, cuda_kernel, dtype):
    kernel = experts.CUDA_KERNEL if cuda_kernel is None else cuda_kernel
    if kernel and _ffi.cuda is None:
        pytest.skip("needs the CUDA extension")
    weights = random_weights(rng, 4, 64, 32)
    x = jnp.zeros((5, 64), dtype)
    ids, shares = jnp.zeros((5, 2), jnp.int32), jnp.zeros((5, 2), jnp.float32)
    call = jax.jit(functools.partial(expert_mlp, cuda_kernel=cuda_kernel))
    lowered = call.trace(x, ids, shares, *weights).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@ddtree_expert_mlp\(.*", lowered)
    assert len(calls) == kernel
    assert ("stablehlo.while" in lowered) == (not kernel)
    # What XLA owns: the result, and the plan, the inner numbers and the parts of 10 choices.
    if kernel:
        size = int(re.search(r"tensor<(\d+)xui8>", calls[0])[1])
        assert size >= 10 * (64 * 4 + 32 * x.dtype.itemsize)
    # A CPU runs its own kernel whatever is asked for CUDA.
    lowered = call.trace(x, ids, shares, *weights).lower(lowering_platforms=("cpu",)).as_text()
    assert len(re.findall(r"@ddtree_expert_mlp\(", lowered)) == 1


def test_more_experts_than_the_cuda_kernel_sorts_by_are_plain_jax(rng):
    weights = random_weights(rng, experts.MAX_CUDA_EXPERTS + 1, 32, 32)
    x = jnp.zeros((1, 32), jnp.float32)
    ids, shares = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.float32)
    lowered = (
        jax.jit(expert_mlp).trace(x, ids, shares, *weights).lower(lowering_platforms=("cuda",))
    )
    assert "stablehlo.while" in lowered.as_text()


def test_arguments_are_checked(rng):
    weights = random_weights(rng, 4, 64, 32)
    x = np.zeros((3, 64), np.float32)
    ids, shares = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="multiples of 32"):
        expert_mlp(
            np.zeros((3, 48), np.float32), ids, shares, *weights[:2], weights[2][:, :48], weights[3]
        )
    with pytest.raises(ValueError, match="expert_ids"):
        expert_mlp(x, ids.astype(np.float32), shares, *weights)
    with pytest.raises(ValueError, match="gate_up"):
        expert_mlp(x, ids, shares, weights[0][:, :-1], *weights[1:])
    with pytest.raises(ValueError, match="down_scale"):
        expert_mlp(x, ids, shares, *weights[:3], weights[3].astype(jnp.float32))
    with pytest.raises(ValueError, match="cuda_kernel"):
        expert_mlp(x, ids, shares, *weights, cuda_kernel=1)


def test_plain_jax_keeps_an_expert_from_tokens_that_did_not_choose_it(rng):
    gate_up, gate_up_scale, down, down_scale = random_weights(rng, 2, 32, 32)
    down_scale = np.array(down_scale)
    down_scale[0] = np.nan
    x = np.ones((2, 32), np.float32)
    ids, shares = np.int32([[0], [1]]), np.ones((2, 1), np.float32)
    operands = map(jnp.asarray, (x, ids, shares, gate_up, gate_up_scale, down, down_scale))
    (out,) = _scan_over_experts(*operands)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
