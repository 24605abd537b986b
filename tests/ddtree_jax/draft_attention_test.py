"""Attention of a drafter's block: the kernel and XLA against float64, and where the kernel stands back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import draft_attention, few_rows
from ddtree_jax.draft_attention import draft_attn

needs_kernel = pytest.mark.skipif(not few_rows.on_one_cpu(), reason="no AVX-512, or no CPU alone")


def _operands(rng, batch, slots, heads, key_heads, context, dim, share=0.6):
    """Random numbers, and a random part of the columns visible; each slot sees itself."""

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    visible = rng.random((batch, slots, context + slots)) < share
    own = np.arange(slots)
    visible[:, own, context + own] = True
    return (
        normal(batch, slots, heads, dim),
        normal(batch, key_heads, context, dim),
        normal(batch, key_heads, context, dim),
        normal(batch, slots, key_heads, dim),
        normal(batch, slots, key_heads, dim),
        visible,
    )


def _float64(query, keys, values, near_keys, near_values, visible):
    """By the definition, one slot and head after the other."""
    query, keys, values, near_keys, near_values = (
        np.asarray(x, np.float64) for x in (query, keys, values, near_keys, near_values)
    )
    batch, slots, heads, dim = query.shape
    group = heads // keys.shape[1]
    out = np.zeros(query.shape)
    for b in range(batch):
        for h in range(heads):
            k = np.concatenate([keys[b, h // group], near_keys[b, :, h // group]])
            v = np.concatenate([values[b, h // group], near_values[b, :, h // group]])
            for t in range(slots):
                seen = np.asarray(visible[b, t], bool)
                scores = k[seen] @ query[b, t, h] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ v[seen] / weights.sum()
    return out


# One key head and many, groups that do and do not fill 16 lanes, contexts around a tile of 64, odd head sizes.
@pytest.mark.parametrize(
    "batch, slots, heads, key_heads, context, dim",
    [
        (1, 8, 4, 2, 200, 64),
        (2, 8, 4, 4, 63, 16),
        (1, 1, 1, 1, 0, 1),
        (3, 5, 6, 2, 64, 24),
        (1, 16, 8, 1, 65, 128),
        (2, 3, 14, 2, 130, 256),
        (1, 2, 4, 2, 1, 33),
    ],
)
def test_equals_float64(rng, batch, slots, heads, key_heads, context, dim):
    operands = _operands(rng, batch, slots, heads, key_heads, context, dim)
    want = _float64(*operands)
    for attend in (draft_attn, lambda *operands: draft_attention._plain(*operands)[0]):
        got = jax.jit(attend)(*operands)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@needs_kernel
def test_the_kernel_runs_and_not_where_it_cannot(rng):
    def used(*operands):
        return "draft_attn" in str(jax.make_jaxpr(draft_attn)(*operands))

    assert used(*_operands(rng, 1, 8, 4, 2, 20, 64))
    assert not used(*_operands(rng, 1, 2, 2, 1, 4, 257))
    half = [jnp.asarray(x, jnp.bfloat16) for x in _operands(rng, 1, 8, 4, 2, 20, 64)[:-1]]
    assert not used(*half, np.ones((1, 8, 28), bool))


def test_a_head_of_257_numbers(rng):
    operands = _operands(rng, 1, 2, 2, 1, 40, 257)
    np.testing.assert_allclose(draft_attn(*operands), _float64(*operands), rtol=2e-5, atol=2e-6)


def test_large_scores(rng):
    """Scores of some thousands, of either sign: a maximum that moves between tiles."""
    query, *rest = _operands(rng, 1, 8, 4, 2, 300, 64)
    for factor in (1e3, -1e3):
        operands = (query * factor, *rest)
        got, want = draft_attn(*operands), _float64(*operands)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype, dim", [("float32", 64), ("float32", 257), ("bfloat16", 64)])
def test_what_nobody_sees_is_not_read(rng, dtype, dim, bad):
    """Rows past those in use, slots that are seen by none, and the columns of another request; kernel and XLA."""
    query, keys, values, near_keys, near_values, visible = _operands(rng, 2, 8, 4, 2, 100, dim)
    visible[:, :, 70:100] = False
    visible[:, :, 103] = False
    visible[:, 3, 0] = True

    def run(attend):
        floats = (jnp.asarray(x, dtype) for x in (query, keys, values, near_keys, near_values))
        return np.asarray(attend(*floats, visible), np.float32)

    ways = draft_attn, lambda *operands: draft_attention._plain(*operands)[0]
    wanted = [run(attend) for attend in ways]
    exact = _float64(query, keys, values, near_keys, near_values, visible)
    for want in wanted:
        np.testing.assert_allclose(want, exact, atol=1e-5 if dtype == "float32" else 0.05)
    keys[:, :, 70:], values[:, :, 70:] = bad, bad
    near_keys[:, 3], near_values[:, 3] = bad, bad
    keys[1], near_values[1] = np.nan, np.nan
    for attend, want in zip(ways, wanted, strict=True):
        got = run(attend)
        np.testing.assert_array_equal(got[0], want[0])
        assert np.all(np.isnan(got[1]))


@needs_kernel
def test_a_slot_does_not_depend_on_the_batch(rng):
    operands = _operands(rng, 3, 8, 4, 2, 90, 64)
    together = np.asarray(draft_attn(*operands))
    for b in range(3):
        alone = draft_attn(*(x[b : b + 1] for x in operands))
        np.testing.assert_array_equal(alone[0], together[b])


def test_vmap_and_gradient(rng):
    operands = _operands(rng, 4, 3, 4, 2, 20, 16)
    want = draft_attn(*operands)
    mapped = jax.vmap(lambda *each: draft_attn(*(x[None] for x in each))[0])(*operands)
    np.testing.assert_allclose(mapped, want, rtol=1e-6, atol=1e-6)

    def total(attend):
        return jax.grad(lambda q: jnp.sum(jnp.sin(attend(q, *operands[1:]))))(operands[0])

    got = total(draft_attn)
    np.testing.assert_allclose(
        got, total(lambda *each: draft_attention._plain(*each)[0]), rtol=1e-5, atol=1e-6
    )
    assert np.max(np.abs(got)) > 1e-3


@needs_kernel
def test_buffers_that_do_not_fit_are_refused(rng):
    operands = list(_operands(rng, 1, 8, 4, 2, 20, 64))
    operands[3] = operands[3][:, :7]
    with pytest.raises(Exception, match="near_keys has the wrong shape"):
        jax.block_until_ready(draft_attention._draft_attn.bind(*operands, kernel=False))


@pytest.mark.parametrize(
    "index, change, words",
    [
        (0, lambda x: x[0], r"query must have shape \[B, T, H, D\], not \[8, 4, 64\]"),
        (0, lambda x: x[:, :, :3], "query's 3 heads must be a multiple of the keys' 2"),
        (
            2,
            lambda x: x[:, :, 1:],
            r"values must have shape \[1, 2, 20, 64\], not \[1, 2, 19, 64\]",
        ),
        (3, lambda x: x[:, 1:], r"near_keys must have shape \[1, 8, 2, 64\]"),
        (5, lambda x: x[:, :1], r"visible must have shape \[1, 8, 28\], not \[1, 1, 28\]"),
        (5, lambda x: x.astype(np.int32), "visible must be bool, not int32"),
    ],
)
def test_operands_that_do_not_fit_are_refused(rng, index, change, words):
    operands = list(_operands(rng, 1, 8, 4, 2, 20, 64))
    operands[index] = change(operands[index])
    with pytest.raises(ValueError, match=words):
        draft_attn(*operands)
