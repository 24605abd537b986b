"""What is no model and no tree is called by its name."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from markov import MarkovTarget, random_pair
from tiny_models import random_target

import ddtree_jax
from ddtree_jax import DecodeConfig, ddtree_decode
from ddtree_jax.decode import draft_tree, verify_round

TOKENS, LENGTHS = np.int32([[1, 2]]), np.int32([2])
FOLDER = pathlib.Path("kimi")


def _refusals(target, drafter):
    swapped = "are target and drafter swapped?"
    wanted = r"target model \(with vocab_size, max_context, init_cache, embed, verify, head\)"
    return (
        ((drafter, target), rf"target must be a {wanted}, not MarkovDrafter.*{swapped}"),
        ((target, target), rf"drafter must be a drafter model .*, not MarkovTarget.*{swapped}"),
        (("kimi", drafter), "target must be .*, not str: load .* ddtree_jax.models.load_target"),
        ((target, FOLDER), "drafter must be .*, not PosixPath: load .*load_drafter"),
        ((None, drafter), "target must be .*, not NoneType, which has no vocab_size"),
        ((target, (drafter,)), "drafter must be .*, not tuple, which has no block_size"),
        ((MarkovTarget, drafter), "target must be a target model, not the class MarkovTarget"),
    )


def test_models(rng):
    target, drafter = random_pair(rng)
    config = DecodeConfig(max_new_tokens=2)
    state = ddtree_decode(target, drafter, TOKENS, LENGTHS, config=DecodeConfig(max_rounds=0)).state
    tree = draft_tree(target, drafter, state, config)
    for models, message in _refusals(target, drafter):
        for call in (
            lambda t, d: ddtree_decode(t, d, TOKENS, LENGTHS, config=config),
            lambda t, d: draft_tree(t, d, state, config),
            lambda t, d: verify_round(t, d, state, tree, config),
        ):
            with pytest.raises(TypeError, match=message):
                call(*models)
    plain = DecodeConfig(mode="ar")
    with pytest.raises(TypeError, match="swapped"):
        ddtree_decode(drafter, target, TOKENS, LENGTHS, config=plain)
    with pytest.raises(TypeError, match="config must be a DecodeConfig, not the class"):
        ddtree_decode(target, drafter, TOKENS, LENGTHS, config=DecodeConfig)
    with pytest.raises(TypeError, match="tree must be a DraftTree, not tuple"):
        verify_round(target, drafter, state, (tree,), config)


def test_trees_and_paths(rng):
    target = random_target(rng)
    tree = ddtree_jax.chain_tree(TOKENS, LENGTHS)
    path = ddtree_jax.tree_accept(tree, TOKENS)
    cache = jnp.zeros((3, 1, 8, 576))
    for wrong, name in ((tuple(vars(tree).values()), "tuple"), (path, "AcceptedPath")):
        for call in (
            lambda tree: ddtree_jax.tree_accept(tree, TOKENS),
            lambda tree: ddtree_jax.verify_attn(
                jnp.zeros((1, 2, 1, 576)), cache, LENGTHS, tree, scale=1.0, layer=0
            ),
            lambda tree: target.verify(tree, cache, LENGTHS),
        ):
            with pytest.raises(TypeError, match=f"tree must be a DraftTree, not {name}"):
                call(wrong)
    for wrong, name in ((tree, "DraftTree"), (path.nodes, "ArrayImpl")):
        with pytest.raises(TypeError, match=f"path must be an AcceptedPath, not {name}"):
            ddtree_jax.commit_path(cache, wrong, LENGTHS)
