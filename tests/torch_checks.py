"""The torch bridge against the JAX primitives, bit for bit: the same checks on every device."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import primitive_checks as jax_side
import torch

import ddtree_jax
import ddtree_jax.torch as bridge

FIELDS = jax_side.TREE_FIELDS


def to_torch(array, device="cpu"):
    """A numpy array's bits as a tensor; unsigned words become int32."""
    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn).to(device)
    if array.dtype == np.uint32:
        array = array.view(np.int32)
    return torch.from_numpy(array).to(device)


def tree_to_torch(tree, device="cpu"):
    fields = {name: to_torch(getattr(tree, name), device) for name in FIELDS}
    return bridge.DraftTree(**fields, max_depth=tree.max_depth)


def bits(value):
    """Any array as the bytes that it is made of."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        value = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        value = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        return np.ascontiguousarray(value.numpy()).view(np.uint8)
    return np.ascontiguousarray(np.asarray(value)).view(np.uint8)


def assert_same_bits(got, want, message=""):
    assert tuple(got.shape) == tuple(want.shape), message
    np.testing.assert_array_equal(bits(got), bits(want), err_msg=message)


def check_draft_topk(rng, device, dtype, *, batch, depth, vocab, k):
    logits = (3 * rng.standard_normal((batch, depth, vocab))).astype(dtype)
    logits[rng.random(logits.shape) < 0.01] = np.nan
    want = ddtree_jax.draft_topk(jnp.asarray(logits), k)
    got = bridge.draft_topk(to_torch(logits, device), k)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def check_tree_build(rng, device, *, batch, depth, k, budget, keep_spine):
    log_probs, token_ids = jax_side.random_candidates(rng, batch, depth, k + 3, k)
    roots = rng.integers(0, 99, batch, dtype=np.int32)
    budgets = rng.integers(-1, budget + 2, batch, dtype=np.int32)
    want = ddtree_jax.tree_build(
        log_probs, token_ids, roots, budget=budget, budgets=budgets, keep_spine=keep_spine
    )
    got = bridge.tree_build(
        to_torch(log_probs, device),
        to_torch(token_ids, device),
        to_torch(roots, device),
        budget=budget,
        budgets=to_torch(budgets, device),
        keep_spine=keep_spine,
    )
    for name in FIELDS:
        assert_same_bits(getattr(got, name), getattr(want, name), name)
    assert got.max_depth == want.max_depth


def check_verify_attn(
    rng, device, dtype, *, batch, budget, heads, rows, path="auto", cache_dtype=None
):
    cache_scale = jax_side.random_scale(rng, cache_dtype, 2)
    sizes = dict(batch=batch, budget=budget, heads=heads, rows=rows)
    query, cache, lengths, tree = jax_side.random_attention(
        rng, dtype, **sizes, cache_dtype=cache_dtype, cache_scale=cache_scale
    )
    where = dict(scale=0.07, layer=1, path=path)
    want = ddtree_jax.verify_attn(
        jnp.asarray(query), jnp.asarray(cache), lengths, tree, **where, cache_scale=cache_scale
    )
    got = bridge.verify_attn(
        to_torch(query, device),
        to_torch(cache, device),
        to_torch(lengths, device),
        tree_to_torch(tree, device),
        **where,
        cache_scale=None if cache_scale is None else to_torch(cache_scale, device),
    )
    assert_same_bits(got, want)


def check_tree_accept(rng, device, *, batch, budget, stop_tokens):
    tree = jax_side.random_tree(rng, batch, budget=budget, depth=7)
    target = rng.integers(-1, 12, tree.tokens.shape, dtype=np.int32)
    for b in range(batch):
        for i in range(1, tree.num_nodes[b]):
            if rng.random() < 0.6:
                target[b, tree.parents[b, i]] = tree.tokens[b, i]
    max_new = rng.integers(-1, 9, batch, dtype=np.int32)
    want = ddtree_jax.tree_accept(tree, target, stop_tokens=stop_tokens, max_new=max_new)
    got = bridge.tree_accept(
        tree_to_torch(tree, device),
        to_torch(target, device),
        stop_tokens=stop_tokens,
        max_new=to_torch(max_new, device),
    )
    for name in ("nodes", "tokens", "num_emitted", "finished"):
        assert_same_bits(getattr(got, name), getattr(want, name), name)


def check_cache(rng, device, dtype, *, layers, batch, rows, nodes, width, cache_dtype=None):
    """append_latents and then commit_path, in place."""
    cache = rng.standard_normal((layers, batch, rows, width)).astype(cache_dtype or dtype)
    latents = rng.standard_normal((batch, nodes, width)).astype(dtype)
    latents[0, 0, 0], latents[0, 0, 1] = np.nan, np.inf
    cache_scale = jax_side.random_scale(rng, cache_dtype, layers)
    lengths = rng.integers(-2, rows, batch, dtype=np.int32)
    count = rng.integers(0, nodes + 1, batch, dtype=np.int32)
    path = np.full((batch, nodes), -1, np.int32)
    for b in range(batch):
        path[b, : count[b]] = np.sort(rng.choice(nodes, count[b], replace=False))
    accepted = ddtree_jax.AcceptedPath(path, path, count, np.zeros(batch, bool))
    layer = int(rng.integers(layers))
    where = {"layer": layer, "cache_scale": cache_scale}
    want = ddtree_jax.append_latents(jnp.asarray(cache), jnp.asarray(latents), lengths, **where)
    held = to_torch(cache, device)
    on_device = to_torch(lengths, device)
    if cache_scale is not None:
        where["cache_scale"] = to_torch(cache_scale, device)
    assert bridge.append_latents(held, to_torch(latents, device), on_device, **where) is held
    assert_same_bits(held, want)
    want = ddtree_jax.commit_path(want, accepted, lengths)
    moved = bridge.AcceptedPath(
        *(to_torch(getattr(accepted, name), device) for name in ("nodes", "tokens", "num_emitted")),
        to_torch(accepted.finished, device),
    )
    assert bridge.commit_path(held, moved, on_device) is held
    assert_same_bits(held, want)


def check_expert_mlp(rng, device, dtype, *, tokens, top_k, experts, hidden, inner, **options):
    args = (
        rng.standard_normal((tokens, hidden)).astype(dtype),
        rng.integers(-1, experts + 1, (tokens, top_k), dtype=np.int32),
        rng.random((tokens, top_k), dtype=np.float32),
        rng.integers(-(2**31), 2**31, (experts, 2 * inner, hidden // 8)).astype(np.int32),
        rng.random((experts, 2 * inner, hidden // 32)).astype(ml_dtypes.bfloat16),
        rng.integers(-(2**31), 2**31, (experts, hidden, inner // 8)).astype(np.int32),
        rng.random((experts, hidden, inner // 32)).astype(ml_dtypes.bfloat16),
    )
    want = ddtree_jax.expert_mlp(*args, **options)
    assert_same_bits(bridge.expert_mlp(*(to_torch(x, device) for x in args)), want)
