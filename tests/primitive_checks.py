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


def random_tree(rng, batch, *, budget, depth, k=None, keep_spine=False):
    """A DraftTree of numpy fields, made by the oracle, with a budget of its own for each request."""
    k = k or max(1, min(budget, 16))
    log_probs, token_ids = random_candidates(rng, batch, depth, k + 3, k)
    budgets = rng.integers(0, budget + 1, batch)
    budgets[0] = budget
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


def random_attention(rng, dtype, *, batch, budget, heads, rows, layers=2, depth=7, lengths=None):
    """(query, cache, lengths, tree): the cache is NaN wherever no node may look."""
    nodes = budget + 1
    tree = random_tree(rng, batch, budget=budget, depth=depth)
    if lengths is None:
        lengths = rng.integers(0, rows - nodes + 1, batch)
    lengths = np.asarray(lengths, np.int32)
    query = rng.normal(size=(batch, nodes, heads, 576)).astype(dtype)
    cache = rng.normal(size=(layers, batch, rows, 576)).astype(dtype)
    for b in range(batch):
        cache[:, b, lengths[b] + nodes :] = np.nan
        query[b, tree.num_nodes[b] :] = np.nan
    return query, cache, lengths, tree


def check_verify_attn(query, cache, lengths, tree, *, scale, layer, path="auto"):
    """Rows equal float64 attention; rows past num_nodes equal their own latent."""
    got = verify_attn(query, cache, lengths, tree, scale=scale, layer=np.int32(layer), path=path)
    assert got.dtype == query.dtype
    got = np.asarray(got).astype(np.float64)
    clean = np.where(np.isnan(query.astype(np.float32)), 0, query.astype(np.float32))
    want = reference.verify_attn(
        clean, cache, lengths, tree.ancestors, tree.num_nodes, scale=scale, layer=layer
    )
    error = np.abs(got - want).max(axis=-1) / np.abs(want).max(axis=-1)
    # A float32 score is known to 2^-24 of itself, and a weight inherits that absolute error of its score.
    rows = np.nan_to_num(
        cache[np.clip(layer, 0, len(cache) - 1)].astype(np.float64), posinf=0, neginf=0
    )
    products = np.einsum("bnhd,bsd->bnhs", clean.astype(np.float64), rows)
    rounding = 4 * 2.0**-24 * scale * np.abs(products).max()
    assert error.max() < (1e-5 + rounding if query.dtype == np.float32 else 1e-2)
    return got


def check_append_latents(rng, dtype, *, layers, batch, rows, nodes, width):
    """Rows land at each request's length, and what falls outside is dropped."""
    cache = rng.normal(size=(layers, batch, rows, width)).astype(dtype)
    latents = rng.normal(size=(batch, nodes, width)).astype(dtype)
    lengths = rng.integers(-nodes - 1, rows + 2, batch, dtype=np.int32)
    for layer in (-1, 0, layers - 1, layers):
        got = append_latents(cache, latents, lengths, layer=jnp.int32(layer))
        want = reference.append_latents(cache, latents, lengths, layer=layer)
        np.testing.assert_array_equal(np.asarray(got), want)


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
    np.testing.assert_array_equal(
        np.asarray(got), reference.commit_path(cache, path, count, lengths)
    )


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
