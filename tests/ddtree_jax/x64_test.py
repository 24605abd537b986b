"""With 64-bit numbers allowed (JAX_ENABLE_X64=1) every primitive and the loop give what they give without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from markov import random_pair
from tiny_models import random_drafter, random_target

import ddtree_jax
from ddtree_jax import CostCurve, DecodeConfig, ddtree_decode
from ddtree_jax.draft_attention import draft_attn
from ddtree_jax.few_rows import few_rows_dot
from ddtree_jax.long_experts import long_expert_mlp


def _both(function, *arguments, **options):
    """Checks that the results of both settings are equal, in their dtypes too, and returns them."""
    results = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            results.append(jax.tree.map(np.asarray, function(*arguments, **options)))
    for narrow, wide in zip(*map(jax.tree.leaves, results), strict=True):
        assert narrow.dtype == wide.dtype
        np.testing.assert_array_equal(narrow, wide)
    return results[0]


def test_primitives(rng):
    batch, depth, vocab, budget, rows = 2, 4, 30, 9, 40
    logits = rng.normal(size=(batch, depth, vocab)).astype(np.float32)
    cache = rng.normal(size=(2, batch, rows, 576)).astype(np.float32)
    query = rng.normal(size=(batch, budget + 1, 3, 576)).astype(np.float32)
    roots, lengths = rng.integers(0, vocab, batch), rng.integers(0, 20, batch)  # int64, as NumPy's

    def one_round(budgets, attention_scale):
        log_probs, token_ids = ddtree_jax.draft_topk(logits, 6)
        options = dict(budget=budget, budgets=budgets, keep_spine=True)
        tree = ddtree_jax.tree_build(log_probs, token_ids, roots, **options)
        rows = ddtree_jax.append_latents(cache, query[:, :, 0], lengths, layer=1)
        mixed = ddtree_jax.verify_attn(query, rows, lengths, tree, scale=attention_scale, layer=1)
        chosen = jnp.where(jnp.arange(budget + 1) < 5, tree.tokens[:, 1:2], -1).astype(jnp.int32)
        path = ddtree_jax.tree_accept(tree, chosen, stop_tokens=(3,), max_new=[4, 5])
        tree = jax.tree.leaves(tree)
        return tree, mixed, path, ddtree_jax.commit_path(rows, path, lengths)

    _both(one_round, None, 0.07)
    _both(one_round, [3, 7], np.float64(0.07))

    def every_layer(latents):
        def write(layer, cache):
            return ddtree_jax.append_latents(cache, latents, lengths, layer=layer)

        return jax.lax.fori_loop(-1, 3, write, jnp.asarray(cache))

    filled = _both(jax.jit(every_layer), query[:, :, 0])
    for b, length in enumerate(lengths):
        want = np.broadcast_to(query[b, :, 0], (2, budget + 1, 576))
        np.testing.assert_array_equal(filled[:, b, length : length + budget + 1], want)
    _both(ddtree_jax.chain_tree, rng.integers(0, 9, (2, 40)), [40, 33])


def test_products(rng):
    experts, hidden, inner, tokens = 5, 64, 32, 7
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    ids = rng.integers(-1, experts + 1, (tokens, 2))
    weights = rng.random((tokens, 2))  # float64, as NumPy's

    def packed(*shape):
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    def scales(*shape):
        return jnp.asarray(rng.uniform(0.01, 0.03, shape), jnp.bfloat16)

    operands = (
        *(packed(experts, 2 * inner, hidden // 8), scales(experts, 2 * inner, hidden // 32)),
        *(packed(experts, hidden, inner // 8), scales(experts, hidden, inner // 32)),
    )
    for run in (ddtree_jax.expert_mlp, quick_compile.jit(long_expert_mlp)):
        weights = weights if run is ddtree_jax.expert_mlp else weights.astype(np.float32)
        ids = ids if run is ddtree_jax.expert_mlp else ids.astype(np.int32)
        _both(run, x, ids, weights, *operands)
    _both(few_rows_dot, x, rng.normal(size=(hidden, 48)).astype(np.float32))
    block = [rng.normal(size=s).astype(np.float32) for s in ((2, 3, 4, 16), *[(2, 2, 9, 16)] * 2)]
    near = [rng.normal(size=(2, 3, 2, 16)).astype(np.float32) for _ in range(2)]
    visible = rng.random((2, 3, 12)) < 0.7
    visible[:, :, 0] = True
    _both(draft_attn, *block, *near, visible)
    for dtype in (jnp.bfloat16,):
        _both(draft_attn, *(jnp.asarray(a, dtype) for a in (*block, *near)), visible)


CURVE = CostCurve((1, 4, 9), (1.0, 1.1, 1.3), None, 0.1)
CONFIGS = {
    "curve": DecodeConfig(max_new_tokens=12, budget=8, cost_curve=CURVE),
    "chain": DecodeConfig(max_new_tokens=12, mode="chain", temperature=1.0, top_k=5, top_p=0.9),
    "ar": DecodeConfig(max_new_tokens=12, mode="ar", temperature=0.5, max_rounds=5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loop(rng, name):
    decode = quick_compile.jit(ddtree_decode, static_argnames="config")
    target, drafter = random_pair(rng)
    tokens = rng.integers(0, 23, (3, 6)).astype(np.int32)
    lengths = np.int32([6, 2, 4])
    # Python's numbers are of 64 bits under jit then.
    given = {"temperature": 0.7, "seed": 5} if CONFIGS[name].temperature else {}
    state = _both(decode, target, drafter, tokens, lengths, config=CONFIGS[name], **given).state
    _both(decode, target, drafter, tokens, lengths, config=CONFIGS[name], state=state)


def test_the_loop_of_the_models(rng):
    decode = quick_compile.jit(ddtree_decode, static_argnames="config")
    small = {"vocab_size": 12, "eos_token_id": 3}
    mask = {"vocab_size": 12, "dflash_config": {"mask_token_id": 11, "target_layer_ids": [2, 0]}}
    models = random_target(rng, **small), random_drafter(rng, **mask)
    tokens = rng.integers(0, 12, (2, 8)).astype(np.int32)
    config = DecodeConfig(max_new_tokens=10, budget=6)
    _both(decode, *models, tokens, np.int32([8, 3]), config=config)
