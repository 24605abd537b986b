"""tree_accept against its oracle, and the ways in which a walk ends."""

import jax.numpy as jnp
import numpy as np
import pytest
from primitive_checks import check_tree_accept, random_tree

import ddtree_jax


@pytest.mark.parametrize("stop_tokens", [(), (3, 11)])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("depth", "budget"), [(1, 4), (7, 30), (31, 256), (4, 0)])
def test_random_walks(rng, depth, budget, stop_tokens, limited):
    tree = random_tree(rng, 8, budget=budget, depth=depth, keep_spine=True)
    for _ in range(5):
        check_tree_accept(rng, tree, stop_tokens=stop_tokens, limited=limited)


CHAIN = ddtree_jax.chain_tree(np.array([[10, 11, 12, 13]], np.int32), np.array([4], np.int32))


@pytest.mark.parametrize(
    ("target", "arguments", "emitted", "finished"),
    [
        ([11, 12, 13, 14], {}, [11, 12, 13, 14], False),
        ([11, 12, 99, 14], {}, [11, 12, 99], False),
        ([11, 12, 13, 14], {"stop_tokens": (12, 5)}, [11, 12], True),
        ([11, 12, 13, 14], {"stop_tokens": (14,)}, [11, 12, 13, 14], True),
        ([11, 12, 13, 14], {"max_new": np.array([3], np.int32)}, [11, 12, 13], True),
        ([11, 12, 13, 14], {"max_new": np.array([0], np.int32)}, [], True),
        ([11, -1, 13, 14], {}, [11], True),
        ([-1, 12, 13, 14], {}, [], True),
    ],
)
def test_how_a_walk_ends(target, arguments, emitted, finished):
    path = ddtree_jax.tree_accept(CHAIN, np.array([target], np.int32), **arguments)
    n = len(emitted)
    np.testing.assert_array_equal(path.tokens[0], emitted + [-1] * (4 - n))
    np.testing.assert_array_equal(path.nodes[0], [*range(n), *[-1] * (4 - n)])
    assert path.num_emitted[0] == n and bool(path.finished[0]) == finished
    assert path.finished.dtype == jnp.bool_


def test_a_tree_without_nodes_emits_nothing():
    empty = ddtree_jax.chain_tree(np.zeros((1, 4), np.int32), np.array([0], np.int32))
    path = ddtree_jax.tree_accept(empty, np.full((1, 4), 5, np.int32))
    assert path.num_emitted[0] == 0 and not path.finished[0]


def test_damaged_links_end_the_walk():
    tree = ddtree_jax.DraftTree(
        **{**vars(CHAIN), "next_sibling": np.array([[0, 1, 2, 3]], np.int32)}
    )
    far = ddtree_jax.DraftTree(
        **{**vars(CHAIN), "next_token": np.array([[9, -7, 4, 2**30]], np.int32)}
    )
    target = np.array([[50, 50, 50, 50]], np.int32)
    for damaged in (tree, far):
        np.testing.assert_array_equal(ddtree_jax.tree_accept(damaged, target).num_emitted, [1])


def test_links_back_and_past_the_last_node_end_the_walk():
    # Node 2 is past num_nodes; node 1's child link goes back to itself, whose token would fit.
    two = ddtree_jax.DraftTree(**{**vars(CHAIN), "num_nodes": np.array([2], np.int32)})
    back = ddtree_jax.DraftTree(
        **{**vars(CHAIN), "next_token": np.array([[1, 1, 3, -1]], np.int32)}
    )
    token = CHAIN.tokens[0]
    along = np.array([[token[1], token[2], token[3], 50]], np.int32)
    np.testing.assert_array_equal(ddtree_jax.tree_accept(two, along).nodes, [[0, 1, -1, -1]])
    around = np.array([[token[1], token[1], token[1], 50]], np.int32)
    np.testing.assert_array_equal(ddtree_jax.tree_accept(back, around).nodes, [[0, 1, -1, -1]])
