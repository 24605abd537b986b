"""Whole decodes by the methods' authors' code: the same tokens, trees and accepted nodes every round."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from safetensors.numpy import load_file

from ddtree_jax import DecodeConfig, ddtree_decode, models
from ddtree_jax.decode import draft_tree, verify_round

_DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module", params=["golden_decode", "golden_decode_deep"])
def golden(request):
    folder = _DATA / request.param
    target = models.load_target(folder / "target", dtype="float32")
    drafter = models.load_drafter(folder / "drafter", target, dtype="float32")
    values = load_file(folder / "golden.safetensors")
    prompts = sorted({int(name.split(".")[0]) for name in values})
    return target, drafter, values, prompts


def _budget(values):
    return max(v.shape[0] for k, v in values.items() if k.endswith(".tokens"))


def test_every_round_builds_the_same_tree_and_accepts_the_same_nodes(golden):
    target, drafter, values, prompts = golden
    budget = _budget(values)
    rounds_seen = 0
    # Whole decodes run as users compile them, below.
    prefill = quick_compile.jit(ddtree_decode, static_argnames="config")
    step_draft = quick_compile.jit(draft_tree, static_argnames="config")
    step_verify = quick_compile.jit(verify_round, static_argnames="config")
    longest = max(len(values[f"{i}.prompt"]) for i in prompts)
    new = max(len(values[f"{i}.output"]) for i in prompts) + 16
    config = DecodeConfig(budget=budget, keep_spine=False, max_new_tokens=new, max_rounds=0)
    for i in prompts:
        prompt = values[f"{i}.prompt"].reshape(-1)
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(prompt)] = prompt
        lengths = jnp.asarray([len(prompt)], jnp.int32)
        state = prefill(target, drafter, jnp.asarray(tokens), lengths, config=config).state
        accepted_per_round = values[f"{i}.accepted_per_round"]
        for r, accepted_count in enumerate(accepted_per_round):
            tree = step_draft(target, drafter, state, config=config)
            # Of a JAX array every slice of another length would be compiled.
            got_tree = jax.tree.map(np.asarray, tree)
            n = int(got_tree.num_nodes[0])
            where = f"prompt {i}, round {r}"
            want_tokens = values[f"{i}.round{r}.tokens"]
            np.testing.assert_array_equal(got_tree.tokens[0, 1:n], want_tokens, where)
            np.testing.assert_array_equal(
                got_tree.parents[0, :n], values[f"{i}.round{r}.parents"], where
            )
            state, path = step_verify(target, drafter, state, tree, config=config)
            accepted = np.asarray(path.nodes)[0, : int(path.num_emitted[0])]
            np.testing.assert_array_equal(accepted, values[f"{i}.round{r}.accepted"], where)
            assert len(accepted) == accepted_count, where
            rounds_seen += 1
        # The reference cuts what followed the prompt at its own limit.
        output = values[f"{i}.output"]
        got = np.asarray(state.tokens)[0, len(prompt) : int(state.lengths[0])]
        assert len(got) >= len(output)
        np.testing.assert_array_equal(got[: len(output)], output)
    assert rounds_seen > 20


@pytest.mark.parametrize("mode", ["ddtree", "chain", "ar"])
def test_every_mode_emits_the_same_tokens(golden, mode):
    target, drafter, values, prompts = golden
    longest = max(len(values[f"{i}.prompt"]) for i in prompts)
    tokens = np.zeros((len(prompts), longest), np.int32)
    lengths = np.zeros(len(prompts), np.int32)
    for row, i in enumerate(prompts):
        prompt = values[f"{i}.prompt"].reshape(-1)
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    new = max(len(values[f"{i}.output"]) for i in prompts)
    config = DecodeConfig(mode=mode, budget=_budget(values), max_new_tokens=new)
    # The authors' own mode as users compile it; the others' text is the same whoever compiles them.
    jit = jax.jit if mode == "ddtree" else quick_compile.jit
    result = jit(ddtree_decode, static_argnames="config")(
        target, drafter, jnp.asarray(tokens), jnp.asarray(lengths), config=config
    )
    emitted = np.asarray(result.tokens)
    for row, i in enumerate(prompts):
        output = values[f"{i}.output"]
        got = emitted[row, lengths[row] :]
        np.testing.assert_array_equal(got[: len(output)], output)
