"""The stages of a verify pass, and the rest of a round, each as a step of `loop_time.TimedLoop`."""

from __future__ import annotations

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp

from ddtree_jax import commit_path, draft_topk, tree_accept, tree_build, verify_attn
from ddtree_jax.budget import node_budgets
from ddtree_jax.models.moe import Router, expert_mlp

_SCALE = 0.1447  # of K2.6's scores; any number takes as long


def verify(held, state, lengths, tree, *, taps):
    """A pass, and the experts i32[mixtures, B * N, k] that its nodes went to."""
    (target,), (cache, _) = held, state
    with _routing() as routes:
        hidden, features, cache = target.verify(tree, cache, lengths, taps=taps)
    chosen = jnp.argmax(target.head(hidden), axis=-1)
    routes = jnp.stack(routes) if routes else no_routes(target, tree.tokens.size)
    return (chosen, features), (cache, routes)


def no_routes(target, rows: int) -> jax.Array:
    """What `verify` carries besides the cache, before the first pass."""
    mixtures = sum(layer.is_moe for layer in target.layers)
    return jnp.zeros((mixtures, rows, target.config.num_experts_per_tok), jnp.int32)


def projections(held, state, x):
    (target,) = held
    batch, nodes, _ = x.shape
    angles = jnp.zeros((batch, nodes, 32), x.dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    kept = []
    for layer in target.layers:
        rows = layer.self_attn.latents(x, cos, sin)
        query = layer.self_attn.absorbed_queries(x, cos, sin)
        kept.append(rows)
        x = x + layer.self_attn.project(query[..., :512])
    return (x, kept), state


def attention(held, cache, query, lengths, tree):
    layers = range(cache.shape[0])
    outputs = [verify_attn(query, cache, lengths, tree, scale=_SCALE, layer=i) for i in layers]
    return outputs, cache


def experts(held, state, x, ids, shares):
    (target,) = held
    mixtures = [layer.mlp.experts for layer in target.layers if layer.is_moe]
    return [
        expert_mlp(x, one, shares, layer) for one, layer in zip(ids, mixtures, strict=True)
    ], state


def head(held, state, x):
    (target,) = held
    return jnp.argmax(target.head(x), axis=-1), state


def draft(held, cache, roots, lengths, features):
    """What a round asks of the drafter: a draft, and the accepted positions appended to its context."""
    target, drafter = held
    logits = drafter.draft(target, cache, roots, lengths)
    counts = jnp.full_like(lengths, features.shape[1])
    return jnp.max(logits, axis=-1), drafter.extend(cache, features, lengths, counts)


def trees(held, state, logits, roots, *, nodes, curve):
    """Candidates, the best tree, the budgets that the curve gives, and the tree that is verified."""
    candidates = draft_topk(logits, min(max(nodes - 1, 1), logits.shape[-1]))
    best = tree_build(*candidates, roots, budget=nodes - 1)
    budgets, _, _ = node_budgets(best.log_probs, best.num_nodes, curve)
    return (
        tree_build(*candidates, roots, budget=nodes - 1, budgets=budgets, keep_spine=True),
        state,
    )


def commit(held, cache, tree, lengths):
    path = tree_accept(tree, tree.tokens)
    return path, commit_path(cache, path, lengths)


@contextlib.contextmanager
def _routing():
    """Collects the ids that routers give while a model is traced."""
    routes, call = [], Router.__call__

    def keeping(self, x):
        ids, weights = call(self, x)
        routes.append(ids)
        return ids, weights

    with mock.patch.object(Router, "__call__", keeping):
        yield routes
