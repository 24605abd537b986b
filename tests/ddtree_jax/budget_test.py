"""The number of nodes against a search through all of them, and what the loop makes of it."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import quick_compile
from hlo import cache_copies
from markov import follow, random_pair

from ddtree_jax import CostCurve, DecodeConfig, ddtree_decode, draft_topk, tree_build
from ddtree_jax.budget import first_nodes, node_budgets

decode = quick_compile.jit(ddtree_decode, static_argnames="config")
budgets_of = quick_compile.jit(node_budgets, static_argnames="curve")


def _random_curve(rng, capacity):
    inner = rng.choice(np.arange(2, capacity + 3), size=3, replace=False)
    nodes = (1, *sorted(int(n) for n in inner))
    verify = np.cumsum(rng.random(len(nodes)) * rng.choice([0.1, 1.0])) + 0.5
    idle = np.minimum(verify, np.sort(verify * rng.uniform(0.3, 1, len(nodes))))
    idle = idle if rng.random() < 0.7 else verify
    return CostCurve(nodes, tuple(verify), tuple(idle), float(rng.random()))


def _rate(curve, log_probs, num_nodes, budgets):
    """Expected tokens a unit of time with these budgets, in the smallest pass that they fit."""
    index = next(i for i, n in enumerate(curve.nodes) if n > max(budgets))
    tokens = sum(
        (count > 0) + np.exp(np.asarray(row[1 : budget + 1], np.float64)).sum()
        for row, count, budget in zip(log_probs, num_nodes, budgets, strict=True)
    )
    node_times = np.subtract(curve.verify, curve.idle)
    nodes = np.interp(1 + sum(budgets) / len(budgets), curve.nodes, node_times)
    return tokens / (curve.draft + curve.idle[index] + nodes)


@pytest.mark.parametrize("batch", [1, 3])
def test_no_other_budgets_promise_more(rng, batch):
    for _ in range(12):
        capacity = 8
        log_probs = np.zeros((batch, capacity), np.float32)
        log_probs[:, 1:] = -np.sort(rng.exponential(1.5, (batch, capacity - 1)), axis=1)
        num_nodes = rng.integers(0, capacity + 1, batch).astype(np.int32)
        num_nodes[rng.integers(batch)] = capacity
        log_probs[np.arange(capacity) >= num_nodes[:, None]] = -np.inf
        curve = _random_curve(rng, capacity)
        got, pays, time = map(np.asarray, budgets_of(log_probs, num_nodes, curve))
        assert np.all((got >= 0) & (got <= np.maximum(num_nodes - 1, 0)))
        largest = max(n for n in curve.nodes if n <= capacity)
        assert got.max() < largest
        choices = [range(min(max(count, 1), largest)) for count in num_nodes]
        best = max(_rate(curve, log_probs, num_nodes, each) for each in itertools.product(*choices))
        assert _rate(curve, log_probs, num_nodes, got) >= best * (1 - 1e-5), (curve, got)
        assert bool(pays) == (best > np.sum(num_nodes > 0) / curve.verify[0])
        expected = np.sum(num_nodes > 0) + sum(
            np.exp(np.float64(row[1 : budget + 1])).sum()
            for row, budget in zip(log_probs, got, strict=True)
        )
        assert expected / best == pytest.approx(float(time) * curve.verify[0], rel=1e-4)


def test_a_staircase_is_climbed_when_a_later_step_pays(rng):
    """The first step loses, the second wins: a search that stops at the first fall would end at the root."""
    log_probs = np.log(np.float32([[1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]]))
    curve = CostCurve((1, 2, 9), (1.0, 2.0, 2.1))
    assert budgets_of(log_probs, np.int32([9]), curve)[0].tolist() == [8]
    steep = CostCurve((1, 2, 9), (1.0, 2.0, 21.0))
    assert budgets_of(log_probs, np.int32([9]), steep)[0].tolist() == [0]


def test_a_request_that_drafts_badly_takes_no_nodes_from_the_pass():
    log_probs = np.log(np.float32([[1, 0.9, 0.8, 0.7], [1, 0.01, 0.005, 0.001]]))
    curve = CostCurve((1, 4), (1.0, 2.0), (1.0, 1.0))
    assert budgets_of(log_probs, np.int32([4, 4]), curve)[0].tolist() == [3, 0]


@pytest.mark.parametrize("nodes", [1, 32, 33])
def test_first_nodes_are_the_tree_of_that_budget(rng, nodes):
    logits = rng.normal(size=(3, 7, 60)).astype(np.float32) * 2
    log_probs, token_ids = draft_topk(logits, 40)
    roots = rng.integers(0, 60, 3).astype(np.int32)
    budgets = rng.integers(0, nodes, 3).astype(np.int32)
    options = dict(budgets=budgets, keep_spine=True)
    cut = first_nodes(tree_build(log_probs, token_ids, roots, budget=64, **options), nodes)
    want = tree_build(log_probs, token_ids, roots, budget=nodes - 1, **options)
    # No path of so few nodes is longer.
    assert cut.max_depth == min(nodes - 1, 7)
    cut = dataclasses.replace(cut, max_depth=want.max_depth)
    for field in dataclasses.fields(want):
        np.testing.assert_array_equal(getattr(cut, field.name), getattr(want, field.name))


def test_text_is_the_targets_whatever_the_curve_and_rounds_follow_it(rng):
    target, drafter = random_pair(rng)
    tokens = rng.integers(0, target.vocab_size, (3, 6)).astype(np.int32)
    lengths = np.int32([6, 2, 4])

    def rounds(**options):
        given = dict(max_new_tokens=40, stop_tokens=(3,), adaptive=False)
        config = DecodeConfig(budget=19, **given, **options)
        result = decode(target, drafter, tokens, lengths, config=config)
        texts = [
            follow(np.asarray(target.table), row[:length], 40, (3,))[0]
            for row, length in zip(tokens, lengths, strict=True)
        ]
        ends = np.asarray(result.lengths)
        for got, end, want in zip(np.asarray(result.tokens), ends, texts, strict=True):
            assert got[:end].tolist() == want, options
        new = np.asarray([len(text) for text in texts]) - lengths
        return np.asarray(result.rounds), new

    rounds(cost_curve=_random_curve(rng, 20), keep_spine=False)
    chain, new = rounds(mode="chain")
    # Seven nodes that keep the spine are the chain; where no draft pays, the text is decoded plainly.
    got, _ = rounds(cost_curve=CostCurve((1, 8, 20), (1.0, 1.0, 100.0)))
    np.testing.assert_array_equal(got, chain)
    got, _ = rounds(cost_curve=CostCurve((1, 8, 20), (1.0, 100.0, 100.0)))
    np.testing.assert_array_equal(got, new - 1)
    assert chain.sum() < (new - 1).sum()


def test_passes_of_several_sizes_copy_no_cache(rng):
    target, drafter = random_pair(rng)
    tokens, lengths = np.zeros((2, 5), np.int32), np.int32([5, 4])
    curve = CostCurve((1, 8, 13), (1.0, 1.5, 2.0))
    config = DecodeConfig(max_new_tokens=20, budget=12, cost_curve=curve)
    start = decode(
        target, drafter, tokens, lengths, config=dataclasses.replace(config, max_rounds=0)
    )
    caches = (start.state.cache, start.state.draft_cache)
    lowered = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state").lower(
        target, drafter, tokens, lengths, config=config, state=start.state
    )
    text = lowered.compile().as_text()
    assert text.count(" while(") >= len(curve.nodes)
    assert not cache_copies(text, *caches)


@pytest.mark.parametrize("unit", [1e-300, 1e-38, 3e38, 1e300])
def test_the_unit_of_a_curve_does_not_matter(unit):
    curve = CostCurve((1, 2, 4), (unit, 1.1 * unit, 1.2 * unit), None, 0.1 * unit)
    log_probs = np.float32([[0, -0.1, -0.5, -1]])
    budgets, pays, time = budgets_of(log_probs, np.int32([4]), curve)
    assert budgets.tolist() == [3] and pays
    assert float(time) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("hello", "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        ("\xff", "not valid JSON"),
        ('{"cost_curve": {"nodes": [1], "verify": [NaN]}}', "above 0"),
        ('{"cost_curve": {"nodes": [1], "verify": 1}}', "verify must be a tuple of numbers"),
    ],
)
def test_a_file_that_holds_no_curve_is_named(tmp_path, text, match):
    path = tmp_path / "curve.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"curve.json: .*{match}"):
        CostCurve.from_json(path)


def test_curves_are_read_and_checked(tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(
        json.dumps(
            {"cost_curve": {"nodes": [1, 9], "verify": [2, 3.5], "idle": [2, 3], "draft": 1}}
        )
    )
    curve = CostCurve.from_json(path)
    assert curve == CostCurve((1, 9), (2.0, 3.5), (2.0, 3.0), 1.0)
    assert hash(DecodeConfig(cost_curve=curve)) == hash(DecodeConfig(cost_curve=curve))
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="no object cost_curve"):
        CostCurve.from_json(path)
    for wrong, match in [
        (((2, 3), (1.0, 1.0)), "ascend from 1"),
        (((1, 3, 3), (1.0, 1.0, 1.0)), "ascend from 1"),
        (((1, 3), (1.0,)), "one length"),
        (((1, 3), (1.0, 0.0)), "above 0"),
        (((1, 3), (1.0, float("nan"))), "above 0"),
        (((1, 3), (1.0, 2.0), (1.0, 2.5)), "longer idle"),
        (((1, 3), (1.0, 2.0), (1.0, 0.5)), "not fall"),
        (((1,), (1.0,), None, -1.0), "draft"),
        (((1, 258), (1.0, 2.0)), "lie in"),
        ((4, (1.0,)), "nodes must be a tuple of numbers, not 4"),
        (((1, 3), None), "verify must be a tuple of numbers, not None"),
        (((1, 3), (1.0, 2.0), 1.0), "idle must be a tuple of numbers, not 1.0"),
        (((1, 3), (1.0, 1e39)), "no time may be more than 1e[+]30 times another"),
    ]:
        with pytest.raises(ValueError, match=match):
            CostCurve(*wrong)
    with pytest.raises(ValueError, match="CostCurve"):
        DecodeConfig(cost_curve=(1, 2))
    for nodes, remedy in (((1,), "measure one"), ((1, 34, 40), "raise budget to 33, measure one")):
        few = CostCurve(nodes, (1.0,) * len(nodes))
        with pytest.raises(ValueError, match=r"no size in 2 \.\. 33, .* verified: " + remedy):
            DecodeConfig(cost_curve=few, budget=32)
        # Where nothing is drafted, or the curve is not asked, there is nothing to refuse.
        for options in (dict(budget=0), dict(budget=32, mode="ar"), dict(budget=32, mode="chain")):
            assert DecodeConfig(cost_curve=few, **options).cost_curve == few
    assert DecodeConfig(cost_curve=CostCurve((1, 33), (1.0, 1.0)), budget=32).budget == 32
    with pytest.raises(ValueError, match="num_nodes"):
        budgets_of(np.zeros((2, 3), np.float32), np.zeros((3,), np.int32), curve)
    roots_alone = budgets_of(np.zeros((2, 1), np.float32), np.int32([1, 0]), curve)
    assert roots_alone[0].tolist() == [0, 0] and not roots_alone[1]
