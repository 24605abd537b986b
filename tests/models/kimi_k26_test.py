"""The target's cached passes against its own plain one, which transformers_test checks from outside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from routing import CLEAR, clear_tokens, routing_margin
from tiny_models import positions_of, random_target

import ddtree_jax

# The weights are arguments, so that tests of one shape share a compilation.
_verify = quick_compile.jit(
    lambda target, *inputs, taps=(): target.verify(*inputs, taps=taps), static_argnames="taps"
)
_forward = quick_compile.jit(
    lambda target, *inputs, taps=(): target.forward(*inputs, taps=taps), static_argnames="taps"
)
_logits = quick_compile.jit(lambda target, tokens: target(tokens, positions_of(tokens)))
_head = quick_compile.jit(lambda target, hidden: target.head(hidden))


def _random_tree(rng, batch, nodes, depth, k, vocab):
    logits = jnp.asarray(rng.normal(0, 2, (batch, depth, vocab)), jnp.float32)
    log_probs, ids = ddtree_jax.draft_topk(logits, k)
    roots = jnp.asarray(rng.integers(0, vocab, batch), jnp.int32)
    budgets = jnp.asarray(rng.integers(1, nodes, batch), jnp.int32)
    return ddtree_jax.tree_build(log_probs, ids, roots, budget=nodes - 1, budgets=budgets)


def _prefill(target, tokens, lengths, rows, chunk):
    """Runs right-padded prompts through `verify` in chunks; hidden rows and the filled cache."""
    batch, width = tokens.shape
    cache = target.init_cache(batch, rows)
    hidden = []
    for start in range(0, width, chunk):
        here = jnp.clip(jnp.asarray(lengths) - start, 0, chunk).astype(jnp.int32)
        part = jnp.asarray(tokens[:, start : start + chunk], jnp.int32)
        tree = ddtree_jax.chain_tree(part, jnp.minimum(here, part.shape[1]))
        start_of_all = jnp.full((batch,), start, jnp.int32)
        rows_of_part, _, cache = _verify(target, tree, cache, start_of_all)
        hidden.append(rows_of_part)
    return jnp.concatenate(hidden, axis=1), cache


@pytest.mark.parametrize("chunk", [4, 32])
def test_chunked_prefill_equals_forward(rng, chunk):
    target = random_target(rng)
    tokens = clear_tokens(rng, target, (3, 23))
    lengths = np.array([23, 1, int(rng.integers(2, 23))])
    hidden, _ = _prefill(target, tokens, lengths, 60, chunk)
    want, _ = _forward(target, jnp.asarray(tokens), positions_of(tokens))
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(hidden[b, :length], want[b, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "experts, changes",
    [
        ("float", {}),
        ("fp8", {}),
        ("int4", {}),
        ("float", {"q_lora_rank": None, "n_shared_experts": 0}),
        ("int4", {"q_lora_rank": None, "n_shared_experts": 0}),
    ],
)
def test_node_logits_equal_the_ancestor_path_alone(rng, experts, changes):
    target = random_target(rng, experts=experts, **changes)
    batch, nodes = 2, 14
    lengths = np.array([11, int(rng.integers(1, 11))], np.int32)
    while True:
        prompt = rng.integers(0, target.vocab_size, (batch, 11))
        tree = _random_tree(rng, batch, nodes, 4, 5, target.vocab_size)
        contexts = _contexts(prompt, lengths, tree)
        # Always of one shape, so that it compiles once.
        padded = np.zeros((batch, nodes, 11 + 5), np.int32)
        for (b, node), context in contexts.items():
            padded[b, node, : len(context)] = context
        if routing_margin(target, padded.reshape(batch * nodes, -1)) > CLEAR:
            break
    _, cache = _prefill(target, prompt, lengths, 40, 11)
    taps = (2, 0)
    hidden, features, _ = _verify(target, tree, cache, jnp.asarray(lengths), taps=taps)
    logits, features = np.asarray(_head(target, hidden)), np.asarray(features)
    assert len(contexts) >= 4
    for (b, node), context in contexts.items():
        row = len(context) - 1
        positions = positions_of(padded[b, :1])
        alone, tapped = _forward(target, padded[b, node, None], positions, taps=taps)
        want = np.asarray(_head(target, alone))[0, row]
        np.testing.assert_allclose(logits[b, node], want, rtol=1e-3, atol=2e-4)
        tapped = np.asarray(tapped)[0, row]
        np.testing.assert_allclose(features[b, node], tapped, rtol=1e-3, atol=5e-4)


def _contexts(prompt, lengths, tree) -> dict:
    """(request, node) to the tokens that the node's logits depend on, its own last."""
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    contexts = {}
    for b, length in enumerate(lengths):
        for node in range(int(tree.num_nodes[b])):
            path, at = [], node
            while at >= 0:
                path.append(tokens[b, at])
                at = parents[b, at]
            contexts[b, node] = [*prompt[b, :length], *path[::-1]]
    return contexts


def test_hiding_an_ancestor_changes_exactly_the_nodes_below_it(rng):
    target = random_target(rng)
    tokens = jnp.asarray(rng.integers(0, target.vocab_size, (1, 6)), jnp.int32)
    tree = ddtree_jax.chain_tree(tokens, jnp.array([6], jnp.int32))
    cache = target.init_cache(1, 12)
    lengths = jnp.array([0], jnp.int32)
    hidden, _, _ = _verify(target, tree, cache, lengths)
    # Nodes 4 and 5 no longer see node 2.
    mask = np.asarray(tree.ancestors).copy()
    mask[0, 4:, 0] &= ~np.uint32(1 << 2)
    tree = dataclasses.replace(tree, ancestors=jnp.asarray(mask))
    hidden_after, _, _ = _verify(target, tree, cache, lengths)
    np.testing.assert_array_equal(hidden_after[0, :4], hidden[0, :4])
    assert np.all(np.any(np.asarray(hidden_after != hidden)[0, 4:], axis=-1))


def test_pad_rows_reach_no_expert_and_poison_nothing(rng):
    target = random_target(rng)
    tokens = rng.integers(0, target.vocab_size, (1, 8)).astype(np.int32)
    other = tokens.copy()
    other[0, 3:] = -1
    count = jnp.array([3], jnp.int32)
    cache, lengths = target.init_cache(1, 16), jnp.array([0], jnp.int32)
    one, two = (
        _verify(target, ddtree_jax.chain_tree(jnp.asarray(each), count), cache, lengths)[0]
        for each in (tokens, other)
    )
    np.testing.assert_array_equal(one[0, :3], two[0, :3])
    assert np.all(np.isfinite(two))


def test_bfloat16_follows_float32(rng):
    seed = int(rng.integers(2**32))
    target, half = (
        random_target(np.random.default_rng(seed), dtype=dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    tokens = jnp.asarray(rng.integers(0, target.vocab_size, (2, 17)))
    want = np.asarray(_logits(target, tokens))
    got = _logits(half, tokens)
    assert got.dtype == jnp.float32
    # Routing may flip for a token near a tie, hence the correlation and not every element.
    assert np.corrcoef(want.ravel(), np.asarray(got).ravel())[0, 1] > 0.99


def test_gradients_are_finite_and_reach_every_parameter(rng):
    target = random_target(rng)
    tokens = jnp.asarray(rng.integers(0, target.vocab_size, (8, 16)))

    def loss(target):
        log_probs = jax.nn.log_softmax(target(tokens[:, :-1], positions_of(tokens[:, :-1])))
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))

    gradients = quick_compile.jit(jax.grad(loss))(target)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        assert np.all(np.isfinite(gradient)), name
        # The bias chooses experts; no gradient passes through a choice.
        assert np.any(gradient != 0) != ("e_score_correction_bias" in name), name


def test_taps_outside_the_target_are_refused(rng):
    target = random_target(rng)
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="layer 3 lies outside the target's 3 layers"):
        jax.eval_shape(lambda: target.forward(tokens, positions_of(tokens), taps=(3,)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_e4m3_cache_follows_the_models_own(rng, dtype):
    """The same numbers, rounded: within what three bits of mantissa cost, and by any scale that fits them."""
    seed = int(rng.integers(2**32))
    tokens = clear_tokens(rng, random_target(np.random.default_rng(seed)), (2, 30))
    results = []
    for cache_dtype, scale in (
        (None, None),
        ("float8_e4m3fn", None),
        ("float8_e4m3fn", (0.3, 1, 2)),
    ):
        # Experts are left out: which of them a token visits is no continuous matter.
        target = random_target(
            np.random.default_rng(seed),
            dtype=dtype,
            cache_dtype=cache_dtype,
            cache_scale=scale,
            first_k_dense_replace=3,
        )
        hidden, cache = _prefill(target, tokens, np.array([30, 30]), 60, 10)
        assert cache.dtype == target.cache_dtype == (cache_dtype or dtype)
        results.append(np.asarray(hidden, np.float64))
    for other in results[1:]:
        error = np.sqrt(((other - results[0]) ** 2).mean() / (results[0] ** 2).mean())
        print(f"relative root-mean-square error {error:.4f}")
        assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dtype": "float16"}, "cache_dtype must be the model's float32 or float8_e4m3fn"),
        ({"cache_dtype": "e4m3"}, "cache_dtype: 'e4m3' is no dtype"),
        ({"cache_scale": (1, 1, 1)}, "cache_scale is for cache_dtype float8_e4m3fn"),
        (
            {"cache_dtype": "float8_e4m3fn", "cache_scale": (1, 1)},
            "cache_scale must have a number for each of 3 layers, not 2",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "cache_scale": (1, 0, 1)},
            r"cache_scale must be finite and above 0 in float32, .* not \(1.0, 0.0, 1.0\)",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "cache_scale": (1, 1, 1e39)},
            "cache_scale must be finite and above 0 in float32",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "cache_scale": (1, 1, 1e-40)},
            "cache_scale must be finite and above 0 in float32",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "cache_scale": 0.5},
            "cache_scale must be a tuple of numbers, not 0.5",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "cache_scale": (1, 1, float("nan"))},
            "cache_scale must be finite and above 0",
        ),
    ],
)
def test_caches_that_cannot_be_are_refused(rng, options, message):
    with pytest.raises(ValueError, match=message):
        random_target(rng, **options)


@pytest.mark.parametrize("shape", [(0,), (1, 1), (2, 20), (41,), (3, 100)])
def test_embeddings_are_rows_of_the_table(rng, shape):
    """Few are copied one by one on a CPU; ids outside are clamped in either way, under vmap too."""
    target = random_target(rng)
    table = np.asarray(target.embed_tokens[...])
    tokens = rng.integers(-3, target.vocab_size + 3, shape).astype(np.int32)
    want = table[np.clip(tokens, 0, target.vocab_size - 1)]
    np.testing.assert_array_equal(target.embed(tokens), want)
    np.testing.assert_array_equal(
        jax.jit(lambda model, ids: model.embed(ids))(target, tokens), want
    )
    if shape[0]:
        np.testing.assert_array_equal(jax.vmap(target.embed)(tokens), want)
