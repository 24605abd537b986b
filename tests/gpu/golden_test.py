"""The golden vectors on a GPU: trees built and walked in one program, at batches to 16 and budgets 32 and 64."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import ddtree_jax

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("budget", [32, 64])
def test_build_then_accept(request, budget, batch):
    folder = request.config.rootpath / "tests" / "data" / "golden_kernels"
    case = load_file(folder / f"compose_{budget}.safetensors")
    given = {
        name: value if name == "stop_tokens" else value[:batch]
        for name, value in case.items()
        if name != "keep_spine"
    }
    assert case["keep_spine"] == [1] and len(case["tokens"]) == 16

    @jax.jit
    def run(log_probs, token_ids, root_tokens, budgets, target_tokens, stop_tokens, max_new):
        tree = ddtree_jax.tree_build(
            log_probs, token_ids, root_tokens, budget=budget, budgets=budgets, keep_spine=True
        )
        path = ddtree_jax.tree_accept(tree, target_tokens, stop_tokens=stop_tokens, max_new=max_new)
        return tree, path

    tree, path = run(
        *(given[name] for name in ("log_probs", "token_ids", "root_tokens", "budgets")),
        *(given[name] for name in ("target_tokens", "stop_tokens", "max_new")),
    )
    for name in ("tokens", "parents", "depths", "next_token", "next_sibling", "ancestors"):
        np.testing.assert_array_equal(getattr(tree, name), given[name], err_msg=name)
    np.testing.assert_array_equal(tree.log_probs, given["out_log_probs"])
    np.testing.assert_array_equal(tree.num_nodes, given["num_nodes"])
    for name in ("nodes", "num_emitted", "finished"):
        np.testing.assert_array_equal(getattr(path, name), given[name], err_msg=name)
    np.testing.assert_array_equal(path.tokens, given["out_tokens"])
