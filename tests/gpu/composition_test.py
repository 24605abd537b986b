"""The tree machinery as one device program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import reference

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def test_topk_build_accept_without_the_host(rng):
    batch, depth, vocab, budget = 8, 7, 163840, 64
    logits = jnp.asarray(3 * rng.standard_normal((batch, depth, vocab)), jnp.bfloat16)
    roots = jnp.asarray(rng.integers(0, vocab, batch), jnp.int32)

    @jax.jit
    def run(logits, roots):
        log_probs, token_ids = ddtree_jax.draft_topk(logits, budget)
        tree = ddtree_jax.tree_build(log_probs, token_ids, roots, budget=budget, keep_spine=True)
        # The target agrees with each node's first child.
        children = jnp.take_along_axis(tree.tokens, jnp.maximum(tree.next_token, 0), axis=1)
        target = jnp.where(tree.next_token >= 0, children, 0)
        return log_probs, token_ids, tree, target, ddtree_jax.tree_accept(tree, target)

    compiled = run.lower(logits, roots).compile()
    text = compiled.as_text()
    for forbidden in ("host_", "outfeed", "infeed", "send(", "recv("):
        assert forbidden not in text
    with jax.transfer_guard("disallow"):
        log_probs, token_ids, tree, target, path = jax.block_until_ready(compiled(logits, roots))
    want_log_probs, want_ids = reference.draft_topk(np.asarray(logits, np.float32), budget)
    np.testing.assert_array_equal(np.asarray(token_ids), want_ids)
    np.testing.assert_allclose(np.asarray(log_probs), want_log_probs, rtol=2e-6, atol=2e-5)
    want_tree = reference.tree_build(
        np.asarray(log_probs), want_ids, np.asarray(roots), budget=budget, keep_spine=True
    )
    for name, value in want_tree.items():
        np.testing.assert_array_equal(np.asarray(getattr(tree, name)), value, err_msg=name)
    want_path = reference.tree_accept(
        want_tree["tokens"],
        want_tree["parents"],
        want_tree["num_nodes"],
        np.asarray(target),
        max_depth=depth,
    )
    for name, value in want_path.items():
        np.testing.assert_array_equal(np.asarray(getattr(path, name)), value, err_msg=name)
