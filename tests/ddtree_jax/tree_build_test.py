"""tree_build against the heap, the reference implementation's trees, and the tree's own promises."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hypothesis import strategies as st
from primitive_checks import assert_tree, check_tree_build, random_tree, tree_build

import ddtree_jax
from ddtree_jax import reference


@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(  # L, V, budget
        [
            (1, 5, 1),
            (1, 5, 9),
            (1, 300, 256),
            (2, 2, 256),
            (3, 1, 7),
            (3, 40, 33),
            (7, 50, 0),
            (7, 50, 6),
            (7, 50, 7),
            (7, 30, 64),
            (7, 300, 256),
            (15, 20, 16),
            (31, 3, 31),
            (31, 40, 64),
        ]
    ),
    keep_spine=st.booleans(),
)
@hypothesis.settings(max_examples=250, deadline=None, database=None)
def test_thousand_random_trees_equal_the_heap(seed, shape, keep_spine):
    depth, vocab, budget = shape
    check_tree_build(seed, batch=4, depth=depth, vocab=vocab, budget=budget, keep_spine=keep_spine)


def golden_trees(data):
    count = len({name.split(".")[0] for name in data.files})
    return [{name: data[f"{i:03d}.{name}"] for name in GOLDEN_FIELDS} for i in range(count)]


GOLDEN_FIELDS = (
    "logits",
    "budget",
    "tokens",
    "depths",
    "parents",
    "visible",
    "target_tokens",
    "accepted",
    "bonus",
)


@functools.partial(quick_compile.jit, static_argnames="budget")
def _tree_and_walk(logits, target, budget):
    """The three kernels in one program, which every golden tree of another shape compiles."""
    k = max(1, min(budget, logits.shape[2]))
    log_probs, token_ids = ddtree_jax.draft_topk(logits, k)
    tree = ddtree_jax.tree_build(log_probs, token_ids, jnp.array([7], jnp.int32), budget=budget)
    return tree, ddtree_jax.tree_accept(tree, target)


def test_golden_trees_and_walks(request):
    trees = golden_trees(np.load(request.config.rootpath / "tests/data/golden_trees.npz"))
    assert len(trees) == 120
    for golden in trees:
        logits, budget = golden["logits"].astype(np.float32), int(golden["budget"])
        n = len(golden["parents"])
        target = np.zeros((1, budget + 1), np.int32)
        target[0, :n] = golden["target_tokens"]
        # JAX would compile each slice below.
        tree, path = jax.tree.map(np.asarray, _tree_and_walk(logits[None], target, budget))
        assert int(tree.num_nodes[0]) == n
        np.testing.assert_array_equal(tree.tokens[0, 1:n], golden["tokens"])
        np.testing.assert_array_equal(tree.depths[0, 1:n], golden["depths"])
        np.testing.assert_array_equal(tree.parents[0, :n], golden["parents"])
        visible = np.unpackbits(tree.ancestors[0, :n].view(np.uint8), axis=-1, bitorder="little")
        np.testing.assert_array_equal(visible[:, :n], golden["visible"])

        count = int(path.num_emitted[0])
        np.testing.assert_array_equal(path.nodes[0, :count], golden["accepted"])
        assert path.tokens[0, count - 1] == golden["bonus"]


def test_all_ties_come_in_lexicographic_order():
    # Every path has mass 0: (0), (0, 0), (0, 0, 0), (0, 0, 1), then the heap has (0, 1) next.
    log_probs = np.zeros((1, 3, 2), np.float32)
    token_ids = np.tile(np.arange(2, dtype=np.int32), (1, 3, 1))
    tree = tree_build(log_probs, token_ids, np.zeros(1, np.int32), budget=14)
    np.testing.assert_array_equal(tree.num_nodes, [15])
    np.testing.assert_array_equal(tree.depths[0], [0, 1, 2, 3, 3, 2, 3, 3, 1, 2, 3, 3, 2, 3, 3])
    np.testing.assert_array_equal(tree.tokens[0], [0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1])


def test_spine_is_kept_where_it_fits(rng):
    # A flat drafter prefers siblings, so the plain tree of 8 nodes never reaches the last position.
    log_probs = np.sort(rng.uniform(-3, -2.9, (2, 7, 12)).astype(np.float32))[..., ::-1].copy()
    token_ids = np.tile(np.arange(12, dtype=np.int32), (2, 7, 1))
    roots = np.zeros(2, np.int32)
    arguments = dict(budget=8, budgets=np.array([8, 6], np.int32))
    plain = tree_build(log_probs, token_ids, roots, **arguments)
    kept = tree_build(log_probs, token_ids, roots, keep_spine=True, **arguments)
    assert np.max(plain.depths[0]) < 7
    node = 0
    for depth in range(1, 8):
        node = int(kept.next_token[0, node])
        assert kept.depths[0, node] == depth and kept.tokens[0, node] == 0
    np.testing.assert_array_equal(kept.num_nodes, [9, 7])
    np.testing.assert_array_equal(kept.parents[1], plain.parents[1])


def test_chain_tree_equals_the_single_path_tree(rng):
    tokens = rng.integers(0, 99, (3, 40), dtype=np.int32)
    num_nodes = np.array([40, 1, 17], np.int32)
    chain = jax.tree.map(np.asarray, ddtree_jax.chain_tree(tokens, num_nodes))
    for b, n in enumerate(num_nodes):
        for i in range(40):
            seen = range(i + 1) if i < n else [i]
            bits = [j for j in range(64) if int(chain.ancestors[b, i, j // 32]) >> (j % 32) & 1]
            assert bits == list(seen)
        np.testing.assert_array_equal(chain.parents[b], [*range(-1, n - 1), *[-1] * (40 - n)])
        np.testing.assert_array_equal(chain.next_token[b], [*range(1, n), *[-1] * (41 - n)])
        np.testing.assert_array_equal(chain.depths[b], [*range(n), *[0] * (40 - n)])
        np.testing.assert_array_equal(chain.tokens[b, :n], tokens[b, :n])
    assert chain.max_depth == 39


def test_a_request_does_not_depend_on_the_others(rng):
    log_probs, token_ids = reference.draft_topk(rng.normal(size=(3, 7, 50)), 16)
    roots = np.arange(3, dtype=np.int32)
    together = tree_build(log_probs, token_ids, roots, budget=16)
    for b in range(3):
        one = slice(b, b + 1)
        alone = tree_build(log_probs[one], token_ids[one], roots[one], budget=16)
        assert_tree(together, vars(alone), one)


def test_nan_candidates_do_not_crash(rng):
    log_probs = np.full((1, 7, 9), np.nan, np.float32)
    log_probs[rng.random(log_probs.shape) < 0.5] = -1
    tree = tree_build(
        log_probs, np.zeros(log_probs.shape, np.int32), np.zeros(1, np.int32), budget=40
    )
    n = int(tree.num_nodes[0])
    assert n == 41 and (np.asarray(tree.parents[0, 1:n]) < np.arange(1, n)).all()


@pytest.mark.parametrize("budget", [0, 5])
def test_rows_past_the_tree_are_alone(rng, budget):
    tree = random_tree(rng, 2, budget=40, depth=4)
    kept = tree_build(
        np.zeros((1, 4, 2), np.float32),
        np.zeros((1, 4, 2), np.int32),
        tree.tokens[0, :1],
        budget=40,
        budgets=np.array([budget], np.int32),
    )
    n = int(kept.num_nodes[0])
    assert n == budget + 1
    for i in range(n, 41):
        assert int(kept.ancestors[0, i, i // 32]) == 1 << (i % 32)
        assert kept.parents[0, i] == kept.next_token[0, i] == kept.next_sibling[0, i] == -1
        assert np.isneginf(kept.log_probs[0, i])
    assert not np.isin(np.arange(n, 41), kept.next_token).any()
