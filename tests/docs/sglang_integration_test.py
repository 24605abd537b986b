"""Every code block of docs/sglang_integration.md, run in order on stand-in tensors, and what it must give."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sglang_oracle as oracle  # noqa: E402

from ddtree_jax import reference  # noqa: E402

BATCH, DEPTH, VOCAB, BUDGET = 3, 4, 40, 20
NODES = BUDGET + 1


@pytest.fixture(scope="module")
def guide(request):
    """The names that the blocks define; each block runs, and none is left out."""
    text = (request.config.rootpath / "docs" / "sglang_integration.md").read_text()
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    assert len(fences) >= 8 and {language for language, _ in fences} == {"python"}
    names = {}
    for _, block in fences:
        exec(compile(block, "docs/sglang_integration.md", "exec"), names)
    return names


@pytest.fixture
def round_(rng, guide):
    """A round's stand-in tensors: logits, roots, lengths, the tree, and a target that mostly follows it."""
    logits = torch.from_numpy(3 * rng.standard_normal((BATCH, DEPTH, VOCAB), dtype=np.float32))
    bonus = torch.from_numpy(rng.integers(0, VOCAB, BATCH))
    seq_lens = torch.from_numpy(rng.integers(1, 12, BATCH))
    tree = guide["draft_tree"](logits, bonus, budget=BUDGET)
    target = rng.integers(0, VOCAB, (BATCH, NODES))
    for b in range(BATCH):
        for i in rng.permutation(np.arange(1, NODES)):
            if rng.random() < 0.6:
                target[b, tree.parents[b, i]] = tree.tokens[b, i]
    return logits, bonus, seq_lens, tree, torch.from_numpy(target)


def _path(tree, target):
    return reference.tree_accept(
        tree.tokens.numpy(),
        tree.parents.numpy(),
        tree.num_nodes.numpy(),
        target.numpy(),
        max_depth=DEPTH,
    )


def test_the_switch(guide, monkeypatch):
    assert not guide["swapped"]("build")
    monkeypatch.setitem(guide, "SWAPS", frozenset({"build"}))
    assert guide["swapped"]("build") and not guide["swapped"]("accept")


def test_swap_1_builds_the_best_first_tree(guide, round_):
    logits, bonus, _, tree, _ = round_
    log_probs, _ = guide["ddtree"].draft_topk(logits, BUDGET)
    _, token_ids = reference.draft_topk(logits.numpy(), BUDGET)
    roots = bonus.numpy().astype(np.int32)
    want = reference.tree_build(log_probs.numpy(), token_ids, roots, budget=BUDGET, keep_spine=True)
    for name in ("tokens", "parents", "num_nodes", "next_token", "next_sibling"):
        np.testing.assert_array_equal(getattr(tree, name).numpy(), want[name], err_msg=name)


def test_swap_1_gives_what_sglangs_builder_returns(guide, round_):
    _, _, seq_lens, tree, _ = round_
    got = guide["verification"](tree, seq_lens, int(seq_lens.sum()))
    want = oracle.build_tree(tree.parents.numpy(), tree.num_nodes.numpy(), seq_lens.numpy(), 0)
    names = {"custom_mask": "tree_mask", "positions": "positions"}
    names |= {
        f"retrieve_{end}": f"retrive_{end}" for end in ("index", "next_token", "next_sibling")
    }
    for name, theirs in names.items():
        np.testing.assert_array_equal(got[name].numpy(), want[theirs], err_msg=name)
    assert got["draft_token"].tolist() == tree.tokens.reshape(-1).tolist()
    assert got["draft_token_num"] == NODES


def test_swap_2_emits_the_accepted_path(guide, round_):
    _, _, seq_lens, tree, target = round_
    path, values = guide["accept_block"](tree, target, seq_lens)
    accept_len, commit_lens, bonus, out_tokens, new_seq_lens = values
    want = _path(tree, target)
    np.testing.assert_array_equal(path.nodes.numpy(), want["nodes"])
    for b, count in enumerate(want["num_emitted"]):
        emitted = want["tokens"][b, :count].tolist()
        assert out_tokens[b, :count].tolist() == emitted and int(bonus[b]) == emitted[-1]
        assert int(commit_lens[b]) == count and int(accept_len[b]) == count - 1
        assert int(new_seq_lens[b]) == int(seq_lens[b]) + count


def test_swap_2_in_eagles_form(guide, round_):
    _, _, seq_lens, tree, target = round_
    inputs = guide["verification"](tree, seq_lens, int(seq_lens.sum()))
    predict, accept_index, count = guide["accept_eagle"](inputs, target, DEPTH)
    want = [
        np.zeros(BATCH * NODES, np.int32),
        np.full((BATCH, DEPTH + 1), -1, np.int32),
        np.zeros(BATCH, np.int32),
    ]
    links = [inputs[f"retrieve_{end}"].numpy() for end in ("index", "next_token", "next_sibling")]
    oracle.verify_tree_greedy(*want, tree.tokens.numpy(), *links, target.numpy())
    for got, value in zip((predict, accept_index, count), want, strict=True):
        np.testing.assert_array_equal(got.numpy(), value)


def test_accepted_rows_and_slots_come_to_the_front(rng, guide, round_):
    _, _, seq_lens, tree, target = round_
    path, _ = guide["accept_block"](tree, target, seq_lens)
    want = _path(tree, target)
    hidden = torch.from_numpy(rng.standard_normal((BATCH, NODES, 6)))
    front = guide["to_front"](hidden, path)
    slots = torch.from_numpy(rng.permutation(BATCH * NODES).reshape(BATCH, NODES))
    pool = torch.from_numpy(rng.standard_normal((BATCH * NODES, 2)))
    before = pool.clone()
    targets, sources = guide["cache_moves"](slots, path)
    pool[targets] = pool[sources]
    for b, count in enumerate(want["num_emitted"]):
        nodes = want["nodes"][b, :count].tolist()
        assert torch.equal(front[b, :count], hidden[b, nodes])
        assert torch.equal(pool[slots[b, :count]], before[slots[b, nodes]])
        assert torch.equal(pool[slots[b, DEPTH + 1 :]], before[slots[b, DEPTH + 1 :]])


def test_swap_3_attends_through_the_slot_table(rng, guide, round_):
    _, _, seq_lens, tree, _ = round_
    heads, rows = 2, 12 + NODES
    slots = rng.permutation(BATCH * rows + 7)[: BATCH * rows].reshape(BATCH, rows)
    table = np.zeros((BATCH + 2, rows), np.int32)
    requests = rng.permutation(BATCH + 2)[:BATCH]
    table[requests] = slots
    pool = rng.standard_normal((BATCH * rows + 7, 1, 576)).astype(np.float32)
    query = rng.standard_normal((BATCH * NODES, heads, 576)).astype(np.float32)
    got = guide["attend"](
        torch.from_numpy(query),
        torch.from_numpy(pool),
        torch.from_numpy(table),
        torch.from_numpy(requests),
        seq_lens,
        tree,
        rows=rows,
        scale=0.05,
    )
    want = reference.verify_attn(
        query.reshape(BATCH, NODES, heads, 576),
        pool[slots, 0][None],
        seq_lens.numpy(),
        tree.ancestors.numpy().view(np.uint32),
        tree.num_nodes.numpy(),
        scale=0.05,
        layer=0,
    )
    np.testing.assert_allclose(got.view(BATCH, NODES, heads, 512).numpy(), want, atol=1e-4)


def test_validation(guide):
    difference = guide["first_difference"]
    assert difference([1, 2, 3], [1, 2, 3]) is None
    assert difference([1, 2, 3], [1, 4, 3]) == 1 and difference([1, 2], [1, 2, 3]) == 2
    rounds = [torch.tensor([1, 4], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)]
    assert guide["tokens_a_round"](rounds) == pytest.approx(8 / 3)
