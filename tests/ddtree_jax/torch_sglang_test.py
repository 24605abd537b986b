"""SGLang's forms of a tree and of an accepted path, against oracles written from its kernels' semantics."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sglang_oracle as oracle  # noqa: E402

import ddtree_jax.torch as bridge  # noqa: E402


@pytest.mark.parametrize("nodes", [1, 2, 9, 33, 65])
def test_verify_tree_greedy_on_random_trees(rng, nodes):
    """10,000 trees in all: predictions, indices and counts, and what must stay as it was."""
    for _ in range(80):
        batch, width = 25, int(rng.integers(1, 11))
        tree = oracle.random_tree(rng, batch, nodes)
        target = oracle.random_target(rng, tree)
        before = oracle.random_results(rng, batch, nodes, width)
        want = [array.copy() for array in before]
        oracle.verify_tree_greedy(*want, *tree.links, target)
        got = [torch.from_numpy(array) for array in before]
        bridge.verify_tree_greedy(
            *got, *map(torch.from_numpy, tree.links), torch.from_numpy(target)
        )
        for name, one, other in zip(("predicts", "accept_index", "count"), got, want, strict=True):
            np.testing.assert_array_equal(one.numpy(), other, err_msg=name)


def _random_draft_tree(rng, batch, depth, k, budget):
    log_probs = -np.sort(rng.exponential(2.0, (batch, depth, k)), axis=-1).astype(np.float32)
    token_ids = rng.integers(0, 99, (batch, depth, k), dtype=np.int32)
    budgets = rng.integers(0, budget + 1, batch, dtype=np.int32)
    budgets[0] = budget
    return bridge.tree_build(
        torch.from_numpy(log_probs),
        torch.from_numpy(token_ids),
        torch.from_numpy(rng.integers(0, 99, batch, dtype=np.int32)),
        budget=budget,
        budgets=torch.from_numpy(budgets),
    )


@pytest.mark.parametrize("mode", list(bridge.TreeMaskMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("budget", [0, 7, 12, 31, 64])
def test_verify_inputs(rng, budget, mode):
    """Every tensor equals what SGLang's builder leaves for the same parents."""
    batch, nodes = 4, budget + 1
    tree = _random_draft_tree(rng, batch, 5, 6, budget)
    seq_lens = rng.integers(0, 30, batch)
    packed = mode == bridge.TreeMaskMode.QLEN_ONLY_BITPACKING
    if packed and nodes > 32:
        with pytest.raises(ValueError, match="32 nodes, not 65: ask for mode=QLEN_ONLY"):
            bridge.sglang_verify_inputs(tree, torch.from_numpy(seq_lens), mode=mode)
        return
    got = bridge.sglang_verify_inputs(
        tree, torch.from_numpy(seq_lens), seq_lens_sum=int(seq_lens.sum()), mode=mode
    )
    parents, counts = tree.parents.numpy(), tree.num_nodes.numpy()
    want = oracle.build_tree(parents, counts, seq_lens, int(mode))
    for name, value in want.items():
        one = getattr(got, name).numpy()
        np.testing.assert_array_equal(one, value, err_msg=name)
        assert one.dtype == value.dtype, name
    assert got.draft_tokens.dtype == torch.int64
    np.testing.assert_array_equal(got.draft_tokens.numpy(), tree.tokens.numpy().reshape(-1))


def test_build_then_verify_walks_as_tree_accept(rng):
    """The two forms agree with each other: flat rows are the accepted nodes."""
    batch, budget, depth = 5, 40, 6
    tree = _random_draft_tree(rng, batch, depth, 8, budget)
    seq_lens = torch.from_numpy(rng.integers(1, 30, batch))
    inputs = bridge.sglang_verify_inputs(tree, seq_lens, seq_lens_sum=int(seq_lens.sum()))
    target = torch.from_numpy(rng.integers(0, 99, (batch, budget + 1)))
    first = tree.next_token.long().clamp(min=0)
    target = torch.where(tree.next_token >= 0, tree.tokens.long().gather(1, first), target)
    predicts = torch.zeros(batch * (budget + 1), dtype=torch.int32)
    accept_index = torch.full((batch, depth + 1), -1, dtype=torch.int32)
    count = torch.zeros(batch, dtype=torch.int32)
    bridge.verify_tree_greedy(
        predicts,
        accept_index,
        count,
        inputs.draft_tokens.view(batch, -1),
        inputs.retrive_index,
        inputs.retrive_next_token,
        inputs.retrive_next_sibling,
        target,
    )
    path = bridge.tree_accept(tree, target.int())
    assert (path.num_emitted > 1).any()
    for b in range(batch):
        n = int(path.num_emitted[b])
        assert int(count[b]) == n - 1
        rows = accept_index[b, :n].long()
        assert (rows - b * (budget + 1)).tolist() == path.nodes[b, :n].tolist()
        assert predicts[rows].tolist() == path.tokens[b, :n].tolist()


def test_a_full_mask_needs_the_sum(rng):
    tree = _random_draft_tree(rng, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="a full mask needs seq_lens_sum"):
        bridge.sglang_verify_inputs(tree, torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="seq_lens must be torch.int64, not torch.int32"):
        bridge.sglang_verify_inputs(tree, torch.tensor([3, 4], dtype=torch.int32))


def test_another_dtype_is_refused(rng):
    tree = oracle.random_tree(rng, 2, 5)
    results = [torch.from_numpy(array) for array in oracle.random_results(rng, 2, 5, 3)]
    links = [torch.from_numpy(array) for array in tree.links]
    target = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="candidates must be torch.int64, not torch.int32"):
        bridge.verify_tree_greedy(*results, links[0].int(), *links[1:], target)
    with pytest.raises(ValueError, match="a column for the root"):
        results[1] = torch.zeros(2, 0, dtype=torch.int32)
        bridge.verify_tree_greedy(*results, *links, target)
