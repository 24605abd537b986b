"""Random inputs for the primitives, and what their results must equal: the same on every device."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import ddtree_jax
from ddtree_jax import reference

TREE_FIELDS = (
    "tokens",
    "parents",
    "depths",
    "next_token",
    "next_sibling",
    "ancestors",
    "log_probs",
    "num_nodes",
)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: Dtypes of the arithmetic and of the cache.
CACHES = {
    **{name: (dtype, dtype) for name, dtype in DTYPES.items()},
    **{f"{name}-e4m3": (dtype, E4M3) for name, dtype in DTYPES.items()},
}

#: Jitted once, so that checks of one shape share a compilation.
draft_topk = jax.jit(ddtree_jax.draft_topk, static_argnums=1)
tree_build = jax.jit(ddtree_jax.tree_build, static_argnames=("budget", "keep_spine"))
verify_attn = jax.jit(ddtree_jax.verify_attn, static_argnames=("scale", "path"))
append_latents = jax.jit(ddtree_jax.append_latents)
tree_accept = jax.jit(ddtree_jax.tree_accept)
commit_path = jax.jit(ddtree_jax.commit_path)


def random_candidates(rng, batch, depth, vocab, k):
    """Candidates from bfloat16 logits, whose coarse steps make ties of path sums common."""
    logits = rng.normal(size=(batch, depth, vocab)) * rng.choice([0.0, 0.3, 2.0, 20.0])
    logits = np.round(logits).astype(np.float32) if rng.random() < 0.3 else logits
    logits = logits.astype(ml_dtypes.bfloat16).astype(np.float32)
    kind = rng.random((batch, depth))
    logits[kind < 0.03] = np.nan  # no normaliser: the whole row is -inf
    logits[(kind > 0.03) & (kind < 0.06), : vocab // 2] = -np.inf
    return reference.draft_topk(logits, k)


def random_tree(rng, batch, *, budget, depth, k=None, keep_spine=False, full=False):
    """A DraftTree of numpy fields, made by the oracle; each request has a budget of its own, or if `full` the whole."""
    k = k or max(1, min(budget, 16))
    log_probs, token_ids = random_candidates(rng, batch, depth, k + 3, k)
    budgets = rng.integers(0, budget + 1, batch)
    budgets[0 : batch if full else 1] = budget
    roots = rng.integers(0, 99, batch, dtype=np.int32)
    fields = reference.tree_build(
        log_probs, token_ids, roots, budget=budget, budgets=budgets, keep_spine=keep_spine
    )
    return ddtree_jax.DraftTree(**fields, max_depth=depth)


def assert_tree(tree, want, b=slice(None)):
    for name in TREE_FIELDS:
        np.testing.assert_array_equal(np.asarray(getattr(tree, name))[b], want[name], err_msg=name)


def check_tree_build(seed, *, batch, depth, vocab, budget, keep_spine):
    """Trees of random candidates equal the heap's, in every field."""
    rng = np.random.default_rng(seed)
    k = max(1, min(budget, vocab, 256))
    log_probs, token_ids = random_candidates(rng, batch, depth, vocab, k)
    roots = rng.integers(0, 2**31, batch, dtype=np.int32)
    budgets = rng.integers(-1, budget + 2, batch, dtype=np.int32) if rng.random() < 0.5 else None
    tree = tree_build(
        log_probs, token_ids, roots, budget=budget, budgets=budgets, keep_spine=keep_spine
    )
    want = reference.tree_build(
        log_probs, token_ids, roots, budget=budget, budgets=budgets, keep_spine=keep_spine
    )
    assert_tree(tree, want)
    assert tree.max_depth == depth


def check_draft_topk(logits, k):
    """Ids equal the oracle's exactly, log-probs to float32 rounding."""
    log_probs, token_ids = draft_topk(logits, k)
    want_log_probs, want_ids = reference.draft_topk(logits, k)
    np.testing.assert_array_equal(token_ids, want_ids)
    np.testing.assert_allclose(log_probs, want_log_probs, rtol=1e-6, atol=2e-6)
    assert (np.asarray(log_probs) <= 0).all()


def random_scale(rng, cache_dtype, layers):
    """A scale for each layer of an e4m3 cache, None for another."""
    if cache_dtype != E4M3:
        return None
    return np.exp2(rng.uniform(-4, 3, layers)).astype(np.float32)


def random_attention(
    rng,
    dtype,
    *,
    batch,
    budget,
    heads,
    rows,
    layers=2,
    depth=7,
    lengths=None,
    cache_dtype=None,
    cache_scale=None,
    full=False,
):
    """(query, cache, lengths, tree): the cache is NaN wherever no node may look.

    Its values, by `cache_scale` where there is one, are normal whatever its dtype.
    """
    nodes = budget + 1
    tree = random_tree(rng, batch, budget=budget, depth=depth, full=full)
    if lengths is None:
        lengths = rng.integers(0, rows - nodes + 1, batch)
    lengths = np.asarray(lengths, np.int32)
    query = rng.normal(size=(batch, nodes, heads, 576)).astype(dtype)
    values = rng.normal(size=(layers, batch, rows, 576))
    if cache_scale is not None:
        values = values / cache_scale[:, None, None, None]
    cache = values.astype(cache_dtype or dtype)
    for b in range(batch):
        cache[:, b, lengths[b] + nodes :] = np.nan
        query[b, tree.num_nodes[b] :] = np.nan
    return query, cache, lengths, tree


def check_verify_attn(query, cache, lengths, tree, *, scale, layer, path="auto", cache_scale=None):
    """Rows equal float64 attention over the values of the cache; rows past num_nodes equal their own latent."""
    options = {"scale": scale, "cache_scale": cache_scale}
    got = verify_attn(query, cache, lengths, tree, layer=np.int32(layer), path=path, **options)
    assert got.dtype == query.dtype
    got = np.asarray(got).astype(np.float64)
    clean = np.where(np.isnan(query.astype(np.float32)), 0, query.astype(np.float32))
    want = reference.verify_attn(
        clean, cache, lengths, tree.ancestors, tree.num_nodes, layer=layer, **options
    )
    error = np.abs(got - want).max(axis=-1) / np.abs(want).max(axis=-1)
    # A float32 score is known to 2^-24 of itself, and a weight inherits that absolute error of its score.
    layer = np.clip(layer, 0, len(cache) - 1)
    rows = np.nan_to_num(cache[layer].astype(np.float64), posinf=0, neginf=0)
    if cache_scale is not None:
        rows *= cache_scale[layer]
    queries = clean.astype(np.float64).reshape(len(clean), -1, clean.shape[-1])
    products = queries @ rows.swapaxes(1, 2)
    rounding = 4 * 2.0**-24 * scale * np.abs(products).max()
    assert error.max() < (1e-5 + rounding if query.dtype == np.float32 else 1e-2)
    return got


def check_append_latents(rng, dtype, *, layers, batch, rows, nodes, width, cache_dtype=None):
    """Rows land at each request's length, and what falls outside is dropped."""
    cache = rng.normal(size=(layers, batch, rows, width)).astype(cache_dtype or dtype)
    cache_scale = random_scale(rng, cache_dtype, layers)
    latents = rng.normal(size=(batch, nodes, width)).astype(dtype)
    lengths = rng.integers(-nodes - 1, rows + 2, batch, dtype=np.int32)
    for layer in (-1, 0, layers - 1, layers):
        scaled = {"cache_scale": cache_scale}
        got = append_latents(cache, latents, lengths, layer=jnp.int32(layer), **scaled)
        want = reference.append_latents(cache, latents, lengths, layer=layer, **scaled)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


def check_append_to_e4m3(rng, dtype):
    """What latents of every size, ties, zeros and numbers that are not finite become, byte for byte."""
    numbers = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    finite = np.sort(numbers[np.isfinite(numbers)])
    ties = (finite[1:] + finite[:-1]) / 2
    random = rng.normal(size=4096) * np.exp2(rng.uniform(-16, 12, 4096))
    edges = [0.0, -0.0, 447.9, 448.1, 464.0, 480.0, -1e38, 3.4e38, np.inf, -np.inf, np.nan]
    near = np.concatenate([np.nextafter(ties, np.float32(s)) for s in (-1e9, 1e9)])
    values = np.concatenate([numbers, ties, near, random, edges]).astype(np.float32)
    values[np.abs(values) < 2.0**-126] = (
        0  # subnormals count as zero on XLA's threads, and 0 / 0 is NaN
    )
    values = values.astype(dtype)
    latents = values[None, None]
    scales = np.array([1.0, 0.25, 1 / 3, 0.0, np.nan, 1e-30], np.float32)
    cache, lengths = np.zeros((len(scales), 1, 1, len(values)), E4M3), np.zeros(1, np.int32)
    for layer in range(len(scales)):
        for cache_scale in (scales, None):
            options = {"layer": np.int32(layer), "cache_scale": cache_scale}
            got = np.asarray(append_latents(cache, latents, lengths, **options))
            want = reference.append_latents(cache, latents, lengths, **options)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
            by = 1.0 if cache_scale is None else cache_scale[layer]
            # Of exact quotients, the nearest of all numbers, found by looking at all of them.
            if by in (1.0, 0.25):
                wide = np.clip(values.astype(np.float64) / by, -448, 448)
                wide = wide[np.isfinite(values.astype(np.float64))]
                written = got[layer, 0, 0].astype(np.float64)
                away = np.abs(wide[:, None] - finite).min(axis=1)
                sound = np.isfinite(values.astype(np.float64))
                np.testing.assert_array_equal(np.abs(written[sound] - wide), away)
                assert np.isnan(written[~sound]).all()


def check_e4m3_bytes(dtype, **options):
    """All 256 bytes of an e4m3 cache convert exactly, seen alone and under attention."""
    numbers = np.arange(256, dtype=np.uint8).view(E4M3)
    want = numbers.astype(np.float32)
    want[~np.isfinite(want)] = np.nan
    # A row past num_nodes returns its own latent; one that sees only itself has a weight of 1.
    cache = np.zeros((1, 256, 1, 576), E4M3)
    cache[0, :, 0, :512] = numbers[:, None]
    query, lengths = np.zeros((256, 1, 2, 576), dtype), np.zeros(256, np.int32)
    for alive in (0, 1):
        tree = ddtree_jax.chain_tree(lengths[:, None], np.full(256, alive, np.int32))
        got = verify_attn(query, cache, lengths, tree, scale=1.0, layer=0, **options)
        got = np.asarray(got).astype(np.float32)[:, 0]
        np.testing.assert_array_equal(got, np.broadcast_to(want[:, None, None], got.shape))
        sound = np.isfinite(want) & (want != 0)  # a sum that starts at zero has no negative zero
        np.testing.assert_array_equal(np.signbit(got)[sound, 0, 0], np.signbit(want)[sound])


def check_commit_path(rng, dtype, *, layers, batch, rows, nodes, depth, width):
    """Accepted rows move up in every layer, and all others stay."""
    cache = rng.normal(size=(layers, batch, rows, width)).astype(dtype)
    path = np.full((batch, depth + 1), -1, np.int32)
    count = rng.integers(0, min(depth, nodes - 1) + 2, batch, dtype=np.int32)
    for b in range(batch):
        path[b, : count[b]] = np.sort(rng.choice(nodes, count[b], replace=False))
        if count[b]:
            path[b, 0] = 0
    lengths = rng.integers(-2, rows + 2, batch, dtype=np.int32)
    accepted = ddtree_jax.AcceptedPath(path, path, count, np.zeros(batch, bool))
    got = commit_path(cache, accepted, lengths)
    want = reference.commit_path(cache, path, count, lengths)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


def check_tree_accept(rng, tree, *, stop_tokens, limited):
    """Walks along targets that mostly follow the tree equal the oracle's."""
    batch, nodes = tree.tokens.shape
    target = rng.integers(0, 40, (batch, nodes), dtype=np.int32)
    for b in range(batch):
        for i in range(1, tree.num_nodes[b]):
            if rng.random() < 0.6:
                target[b, tree.parents[b, i]] = tree.tokens[b, i]
    target[rng.random((batch, nodes)) < 0.05] = -1
    max_new = rng.integers(-1, tree.max_depth + 2, batch, dtype=np.int32) if limited else None
    got = tree_accept(tree, target, stop_tokens=np.asarray(stop_tokens, np.int32), max_new=max_new)
    want = reference.tree_accept(
        tree.tokens,
        tree.parents,
        tree.num_nodes,
        target,
        max_depth=tree.max_depth,
        stop_tokens=stop_tokens,
        max_new=max_new,
    )
    for name, value in want.items():
        np.testing.assert_array_equal(np.asarray(getattr(got, name)), value, err_msg=name)
    return want
