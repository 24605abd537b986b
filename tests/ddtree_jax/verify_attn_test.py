"""verify_attn against float64 attention, and what a row may and may not see."""

import dataclasses

import numpy as np
import pytest
from primitive_checks import (
    CACHES,
    DTYPES,
    E4M3,
    check_e4m3_bytes,
    check_verify_attn,
    random_attention,
    random_scale,
    random_tree,
    verify_attn,
)

import ddtree_jax
from ddtree_jax import reference

SCALE = 1 / np.sqrt(192)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    ("batch", "budget", "heads", "rows"),
    [
        (1, 0, 1, 1),
        (3, 16, 4, 150),
        (2, 7, 3, 33),
        (1, 63, 8, 300),
        (2, 10, 64, 90),
        (1, 256, 3, 400),
        (2, 31, 1, 700),
    ],
)
def test_random_trees_and_ragged_lengths(rng, kind, batch, budget, heads, rows):
    dtype, cache_dtype = CACHES[kind]
    scaled = {"cache_scale": random_scale(rng, cache_dtype, 2)}
    sizes = dict(batch=batch, budget=budget, heads=heads, rows=rows)
    inputs = random_attention(rng, dtype, cache_dtype=cache_dtype, **sizes, **scaled)
    check_verify_attn(*inputs, scale=SCALE, layer=1, **scaled)


@pytest.mark.parametrize("kind", CACHES)
def test_empty_and_full_prefixes(rng, kind):
    dtype, cache_dtype = CACHES[kind]
    sizes = dict(batch=3, budget=9, heads=4, rows=80, lengths=[0, 70, 1])
    query, cache, lengths, tree = random_attention(rng, dtype, cache_dtype=cache_dtype, **sizes)
    check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0)


def test_lengths_and_layers_out_of_range_are_clamped(rng):
    query, cache, _, tree = random_attention(
        rng, DTYPES["float32"], batch=2, budget=9, heads=2, rows=60, lengths=[0, 50]
    )
    cache = np.where(np.isnan(cache), np.float32(0.5), cache)
    for layer in (-3, 9):
        lengths = np.array([-5, 2**31 - 1], np.int32)
        check_verify_attn(query, cache, lengths, tree, scale=SCALE, layer=layer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_query_gives_the_mean_of_what_it_sees(rng, dtype):
    query, cache, lengths, tree = random_attention(
        rng, DTYPES[dtype], batch=1, budget=16, heads=4, rows=100, lengths=[61]
    )
    got = np.asarray(verify_attn(np.zeros_like(query), cache, lengths, tree, scale=1.0, layer=0))
    rows = cache[0, 0].astype(np.float64)
    for i in range(17):
        bits = [j for j in range(17) if tree.ancestors[0, i, 0] >> np.uint32(j) & 1]
        seen = rows[[*range(61), *(61 + j for j in bits)], :512]
        np.testing.assert_allclose(
            got[0, i].astype(np.float64),
            np.broadcast_to(seen.mean(axis=0), (4, 512)),
            atol=1e-6 if dtype == "float32" else 2e-3,
        )


def test_large_scores_do_not_overflow(rng):
    query, cache, lengths, tree = random_attention(
        rng, DTYPES["float32"], batch=1, budget=12, heads=4, rows=200, lengths=[150]
    )
    check_verify_attn(query, cache, lengths, tree, scale=5.0, layer=0)


def test_hiding_an_ancestor_changes_only_its_row(rng):
    query, cache, lengths, tree = random_attention(
        rng, DTYPES["float32"], batch=1, budget=16, heads=2, rows=64, lengths=[40]
    )
    before = np.asarray(verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0))
    deepest = int(np.argmax(tree.depths[0]))
    ancestors = tree.ancestors.copy()
    ancestors[0, deepest, 0] &= ~np.uint32(1 << int(tree.parents[0, deepest]))
    hidden = dataclasses.replace(tree, ancestors=ancestors)
    after = check_verify_attn(query, cache, lengths, hidden, scale=SCALE, layer=0)
    changed = np.any(after != before, axis=(0, 2, 3))
    np.testing.assert_array_equal(np.flatnonzero(changed), [deepest])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_stays_in_its_rows(rng, kind, poison):
    dtype, cache_dtype = CACHES[kind]
    query, cache, lengths, tree = random_attention(
        rng, dtype, batch=3, budget=40, heads=4, rows=200, cache_dtype=cache_dtype
    )
    clean = np.asarray(verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0))
    clean = clean.astype(np.float32)
    sick = cache.copy()
    sick[:, 1] = poison  # all of another request
    leaf = int(tree.num_nodes[0]) - 1  # a node that no other sees
    sick[0, 0, lengths[0] + leaf] = poison
    sick[1] = poison  # another layer
    got = np.asarray(verify_attn(query, sick, lengths, tree, scale=SCALE, layer=0))
    got = got.astype(np.float32)
    np.testing.assert_array_equal(got[0, :leaf], clean[0, :leaf])
    assert not np.isfinite(got[0, leaf]).all()
    np.testing.assert_array_equal(got[2], clean[2])


def test_a_poisoned_query_stays_in_its_head(rng):
    query, cache, lengths, tree = random_attention(
        rng, DTYPES["float32"], batch=1, budget=16, heads=4, rows=64
    )
    clean = np.array(verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0))
    query[0, 3, 2, 100] = np.nan
    got = np.array(verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0))
    assert np.isnan(got[0, 3, 2]).all()
    got[0, 3, 2] = clean[0, 3, 2] = 0
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_gives_causal_attention(rng, dtype):
    query, cache, lengths, _ = random_attention(
        rng, DTYPES[dtype], batch=2, budget=40, heads=2, rows=100
    )
    query = np.where(np.isnan(query), query.dtype.type(0.1), query)
    tokens = rng.integers(0, 9, (2, 41), dtype=np.int32)
    chain = ddtree_jax.chain_tree(tokens, np.array([41, 20], np.int32))
    check_verify_attn(query, cache, lengths, chain, scale=SCALE, layer=1)


@pytest.mark.parametrize("kind", CACHES)
def test_a_request_does_not_depend_on_the_others(rng, kind):
    dtype, cache_dtype = CACHES[kind]
    query, cache, lengths, tree = random_attention(
        rng, dtype, batch=3, budget=20, heads=8, rows=400, cache_dtype=cache_dtype
    )
    together = np.asarray(verify_attn(query, cache, lengths, tree, scale=SCALE, layer=0))
    for b in range(3):
        one = slice(b, b + 1)
        alone = ddtree_jax.DraftTree(
            **{k: v[one] for k, v in vars(tree).items() if k != "max_depth"}, max_depth=7
        )
        got = verify_attn(query[one], cache[:, one], lengths[one], alone, scale=SCALE, layer=0)
        np.testing.assert_array_equal(np.asarray(got[0]), together[b])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_past_the_last_node_mean_nothing(rng, dtype):
    tree = random_tree(rng, 2, budget=40, depth=5)
    few = np.array([9, 33], np.int32)
    few = np.minimum(few, np.asarray(tree.num_nodes))
    query = rng.normal(size=(2, 41, 3, 576)).astype(dtype)
    cache = rng.normal(size=(1, 2, 70, 576)).astype(dtype)
    lengths = np.array([7, 20], np.int32)
    extra = np.asarray(tree.ancestors).copy()
    for b in range(2):
        for j in range(few[b], 41):
            extra[b, : few[b], j // 32] |= np.uint32(1 << j % 32)
    outs = [
        ddtree_jax.verify_attn(
            query,
            cache,
            lengths,
            dataclasses.replace(tree, ancestors=ancestors, num_nodes=few),
            scale=0.1,
            layer=0,
        )
        for ancestors in (tree.ancestors, extra)
    ]
    for b in range(2):
        np.testing.assert_array_equal(outs[0][b, : few[b]], outs[1][b, : few[b]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bytes_of_an_e4m3_cache_convert_exactly(dtype):
    check_e4m3_bytes(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_of_a_power_of_two_is_the_values_own(rng, dtype):
    """Bits do not change when such a factor moves from the cache's numbers to their scale."""
    query, cache, lengths, tree = random_attention(
        rng, DTYPES[dtype], batch=2, budget=20, heads=3, rows=100, cache_dtype=E4M3
    )
    # No subnormals, which would lose digits.
    cache = (cache.astype(np.float32).round(1) * 8).astype(E4M3)
    small = (cache.astype(np.float32) / 8).astype(E4M3)
    np.testing.assert_array_equal(small.astype(np.float32) * 8, cache.astype(np.float32))
    scales = np.array([1.0, 8.0], np.float32)
    one = verify_attn(query, cache, lengths, tree, scale=0.0625, layer=1)
    other = verify_attn(query, small, lengths, tree, scale=0.0625, layer=1, cache_scale=scales)
    for b, alive in enumerate(tree.num_nodes):
        np.testing.assert_array_equal(np.asarray(one)[b, :alive], np.asarray(other)[b, :alive])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_e4m3_cache_costs_in_accuracy(rng, dtype):
    """Against the attention of the values before they were rounded: three bits of mantissa, averaged by the softmax."""
    dtype = DTYPES[dtype]
    query, values, lengths, tree = random_attention(
        rng, dtype, batch=1, budget=16, heads=8, rows=1100, layers=1, lengths=[1024]
    )
    rounded = values.astype(E4M3)
    alive = int(tree.num_nodes[0])
    query = np.nan_to_num(query.astype(np.float32)).astype(dtype)
    where = dict(scale=SCALE, layer=0)
    want = reference.verify_attn(query, values, lengths, tree.ancestors, tree.num_nodes, **where)
    got = np.asarray(verify_attn(query, rounded, lengths, tree, **where)).astype(np.float64)
    # What is left is the cache's rounding.
    check_verify_attn(query, rounded, lengths, tree, **where)
    error = np.sqrt(((got - want)[0, :alive] ** 2).mean() / (want[0, :alive] ** 2).mean())
    print(f"relative root-mean-square error {error:.4f}")
    assert 0.005 < error < 0.08
