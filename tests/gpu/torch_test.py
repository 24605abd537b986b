"""The torch bridge on CUDA: bit for bit the JAX primitives, and captured in a CUDA graph."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import primitive_checks as jax_checks  # noqa: E402
import sglang_oracle as oracle  # noqa: E402
import torch_checks as checks  # noqa: E402

import ddtree_jax.torch as bridge  # noqa: E402

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a torch with CUDA"),
]

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draft_topk(rng, dtype):
    checks.check_draft_topk(rng, "cuda", dtype, batch=4, depth=7, vocab=163840, k=64)
    checks.check_draft_topk(rng, "cuda", dtype, batch=1, depth=3, vocab=2051, k=256)


@pytest.mark.parametrize("keep_spine", [False, True])
@pytest.mark.parametrize("budget", [0, 16, 32, 64, 256])
def test_tree_build(rng, budget, keep_spine):
    checks.check_tree_build(
        rng, "cuda", batch=16, depth=7, k=min(64, budget + 1), budget=budget, keep_spine=keep_spine
    )


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("path", ["auto", "portable", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_attn(rng, dtype, path, cache_dtype):
    if path == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    sizes = dict(batch=3, budget=32, heads=8, rows=300)
    checks.check_verify_attn(rng, "cuda", dtype, **sizes, path=path, cache_dtype=cache_dtype)


@pytest.mark.parametrize("stop_tokens", [(), (3, 7)])
def test_tree_accept(rng, stop_tokens):
    checks.check_tree_accept(rng, "cuda", batch=16, budget=64, stop_tokens=stop_tokens)


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cache(rng, dtype, cache_dtype):
    sizes = dict(layers=3, batch=4, rows=40, nodes=9, width=576)
    checks.check_cache(rng, "cuda", dtype, **sizes, cache_dtype=cache_dtype)


@pytest.mark.parametrize("nodes", [9, 65])
def test_verify_tree_greedy_on_random_trees(rng, nodes):
    batch = 5000
    tree = oracle.random_tree(rng, batch, nodes)
    target = oracle.random_target(rng, tree)
    before = oracle.random_results(rng, batch, nodes, 8)
    want = [array.copy() for array in before]
    oracle.verify_tree_greedy(*want, *tree.links, target)
    got = [checks.to_torch(array, "cuda") for array in before]
    links = [checks.to_torch(array, "cuda") for array in tree.links]
    bridge.verify_tree_greedy(*got, *links, checks.to_torch(target, "cuda"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.cpu().numpy(), other)


def _round(logits, roots, seq_lens, seq_lens_sum, query, cache, latents, targets):
    """A whole round, with SGLang's forms on the way; the target's token after a node depends on the node's own."""
    depth, budget = logits.shape[1], query.shape[1] - 1
    log_probs, token_ids = bridge.draft_topk(logits, budget)
    tree = bridge.tree_build(log_probs, token_ids, roots, budget=budget, keep_spine=True)
    inputs = bridge.sglang_verify_inputs(tree, seq_lens, seq_lens_sum=seq_lens_sum)
    lengths = seq_lens.to(torch.int32)
    bridge.append_latents(cache, latents, lengths, layer=1)
    attended = bridge.verify_attn(query, cache, lengths, tree, scale=0.07, layer=1)
    # Half of the nodes are followed by their first child, so that paths are accepted.
    child = tree.tokens.gather(1, tree.next_token.clamp(min=0).long())
    target = torch.where((tree.next_token >= 0) & (targets % 2 == 0), child, targets)
    path = bridge.tree_accept(tree, target, stop_tokens=(5, 9))
    bridge.commit_path(cache, path, lengths)
    batch, nodes = tree.tokens.shape
    predicts = torch.zeros(batch * nodes, dtype=torch.int32, device=logits.device)
    accept_index = torch.full((batch, depth + 1), -1, dtype=torch.int32, device=logits.device)
    count = torch.zeros(batch, dtype=torch.int32, device=logits.device)
    links = (inputs.retrive_index, inputs.retrive_next_token, inputs.retrive_next_sibling)
    candidates = inputs.draft_tokens.view(batch, nodes)
    bridge.verify_tree_greedy(predicts, accept_index, count, candidates, *links, target.long())
    fields = [getattr(tree, field.name) for field in dataclasses.fields(tree)][:-1]
    return [
        *fields,
        *inputs,
        attended,
        path.nodes,
        path.tokens,
        predicts,
        accept_index,
        count,
        cache,
    ]


def _round_inputs(rng, *, batch, depth, vocab, budget, heads, rows):
    nodes = budget + 1
    # The sum stays, since it is the full mask's size; the lengths themselves change.
    seq_lens = np.full(batch, 20) + rng.permutation(np.arange(batch) - batch // 2)
    floats = ml_dtypes.bfloat16
    arrays = [
        (3 * rng.standard_normal((batch, depth, vocab))).astype(floats),
        rng.integers(0, vocab, batch, dtype=np.int32),
        seq_lens.astype(np.int64),
        rng.standard_normal((batch, nodes, heads, 576)).astype(floats),
        rng.standard_normal((2, batch, rows, 576)).astype(floats),
        rng.standard_normal((batch, nodes, 576)).astype(floats),
        rng.integers(0, vocab, (batch, nodes), dtype=np.int32),
    ]
    return [checks.to_torch(array, "cuda") for array in arrays], int(seq_lens.sum())


@pytest.mark.parametrize(("batch", "budget"), [(1, 16), (16, 32), (16, 64)])
def test_a_cuda_graph_of_a_round_replays_with_other_inputs(rng, batch, budget):
    shape = dict(batch=batch, depth=7, vocab=4099, budget=budget, heads=4, rows=200)
    held, total = _round_inputs(rng, **shape)

    def run(inputs):
        return _round(*inputs[:3], total, *inputs[3:])

    # As torch asks: once on a side stream first, so that nothing is set up during the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(held)
    seen = []
    for _ in range(3):
        fresh, fresh_total = _round_inputs(rng, **shape)
        assert fresh_total == total
        for static, value in zip(held, fresh, strict=True):
            static.copy_(value)
        graph.replay()
        got = [one.clone() for one in captured]
        want = run(fresh)
        for place, (one, other) in enumerate(zip(got, want, strict=True)):
            checks.assert_same_bits(one, other, f"result {place}")
        seen.append(got[0].cpu())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_runs_on_the_current_stream(rng):
    """Work queued before on another stream is waited for only by that stream: results there are right."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        logits = torch.zeros(1, 1, 1 << 20, device="cuda")
        for _ in range(50):
            logits = logits + 1
        logits[0, 0, 7] = 1000.0
        _, token_ids = bridge.draft_topk(logits, 2)
    stream.synchronize()
    assert token_ids.tolist() == [[[7, 0]]]


def test_devices_must_agree():
    log_probs = torch.zeros(1, 2, 3, device="cuda")
    token_ids = torch.zeros(1, 2, 3, dtype=torch.int32)
    roots = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(
        ValueError, match="token_ids must be on cuda:0 like the other tensors, not on cpu"
    ):
        bridge.tree_build(log_probs, token_ids, roots, budget=2)


def test_a_slice_between_words_is_refused():
    held = torch.zeros(3 * 576 + 1, dtype=torch.bfloat16, device="cuda")
    query, cache = held[: 2 * 576].view(1, 2, 1, 576), held[1 : 3 * 576 + 1].view(1, 1, 3, 576)
    lengths = torch.zeros(1, dtype=torch.int32, device="cuda")
    tree = checks.tree_to_torch(
        jax_checks.random_tree(np.random.default_rng(0), 1, budget=1, depth=1), "cuda"
    )
    with pytest.raises(ValueError, match="cache must start at a multiple of 16 bytes: call .clone"):
        bridge.verify_attn(query, cache, lengths, tree, scale=1.0, layer=0)


@pytest.mark.parametrize("tokens", [1, 17, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expert_mlp(rng, dtype, tokens):
    sizes = dict(tokens=tokens, top_k=4, experts=24, hidden=512, inner=256)
    checks.check_expert_mlp(rng, "cuda", dtype, **sizes, cuda_kernel=True)
