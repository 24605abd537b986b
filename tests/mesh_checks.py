"""What a mesh of CPU devices must compute, one check a process: `python mesh_checks.py CHECK SEED`.

JAX makes several devices of a CPU only at its start, hence processes of their own (tests/models/mesh_test.py).
"""

import collections
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import quick_compile
from expert_checks import error_of
from flax import nnx
from hlo import cache_copies, collectives
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from losslessness import first_difference, judge
from markov import random_pair
from primitive_checks import random_tree
from ragged_texts import continuations, ties_between
from tiny_models import random_drafter, random_target

import ddtree_jax
from ddtree_jax import CostCurve, DecodeConfig, ddtree_decode
from ddtree_jax.models import load_drafter, load_target, save_drafter, save_target
from ddtree_jax.models.moe import expert_mlp, split_expert_mlp
from ddtree_jax.models.placement import Placement
from ddtree_jax.models.sharding import ShardingRules

# One dense layer and two mixtures; few tokens, so that a drafter that knows nothing is right now and then.
_LAYERS, _EXPERTS, _VOCAB = 3, 12, 16
_TARGET = {
    "vocab_size": _VOCAB,
    "num_attention_heads": 4,
    "n_routed_experts": _EXPERTS,
    "num_hidden_layers": _LAYERS,
}
_DRAFTER = {
    "vocab_size": _VOCAB,
    "num_target_layers": _LAYERS,
    "dflash_config": {"mask_token_id": _VOCAB - 1, "target_layer_ids": [2, 0]},
}
quick_decode = quick_compile.jit(ddtree_decode, static_argnames="config")


def _mesh(devices):
    kinds = (AxisType.Auto,)
    return jax.make_mesh((devices,), ("model",), axis_types=kinds, devices=jax.devices()[:devices])


def _saved(rng):
    save_target(random_target(rng, experts="int4", **_TARGET), "target")
    save_drafter(random_drafter(rng, **_DRAFTER), "drafter")


def _loaded(devices=None):
    mesh = None if devices is None else _mesh(devices)
    target = load_target("target", dtype="float32", mesh=mesh)
    return target, load_drafter("drafter", target)


def _placed(target, devices):
    """A copy of a target over a mesh: `save_target` packs float experts."""
    target = nnx.clone(target)
    target.placement = Placement(_mesh(devices))
    shardings = target.placement.rules.shardings(target, target.placement.mesh)
    for path, parameter in nnx.to_flat_state(nnx.state(target)):
        parameter.set_value(jax.device_put(parameter[...], shardings[path]))
    return target


def check_attention(rng):
    """`Placement.verify_attn` gives what `verify_attn` gives, bit for bit."""
    batch, nodes, heads, rows, layers = 2, 13, 8, 40, 3
    tree = jax.tree.map(jnp.asarray, random_tree(rng, batch, budget=nodes - 1, depth=5))
    lengths = jnp.asarray(rng.integers(0, rows - nodes + 1, batch), jnp.int32)
    scales = jnp.asarray(rng.uniform(0.5, 2, layers), jnp.float32)
    for dtype, cache_dtype in (
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.float8_e4m3fn),
    ):
        query = jnp.asarray(rng.normal(size=(batch, nodes, heads, 576)), dtype)
        cache = jnp.asarray(rng.normal(size=(layers, batch, rows, 576)), cache_dtype)
        scale = {"cache_scale": scales} if cache_dtype == jnp.float8_e4m3fn else {}
        options = dict(scale=0.05, layer=int(rng.integers(layers)), **scale)
        want = ddtree_jax.verify_attn(query, cache, lengths, tree, **options)
        for devices, axis in ((2, "model"), (4, "model"), (4, None)):
            placement = Placement(_mesh(devices), ShardingRules(heads=axis))
            got = placement.verify_attn(query, cache, lengths, tree, **options)
            assert got.dtype == dtype
            assert got.sharding.shard_shape(got.shape)[2] == (heads // devices if axis else heads)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def check_embedding(rng):
    """A lookup in a split table gives the table's rows, the first or last for ids outside, in one sum of rows."""
    for dtype in ("float32", "bfloat16"):
        target = random_target(rng, dtype=jnp.dtype(dtype), **_TARGET)
        table = np.asarray(target.embed_tokens[...])
        for devices in (2, 4):
            split = _placed(target, devices)
            for shape in ((1, 1), (1,), (2, 17)):
                tokens = rng.integers(-3, _VOCAB + 3, shape).astype(np.int32)
                compiled = jax.jit(lambda split, tokens: split.embed(tokens)).lower(split, tokens)
                compiled = compiled.compile()
                got = compiled(split, tokens)
                assert got.dtype == dtype and got.sharding.is_fully_replicated
                np.testing.assert_array_equal(
                    np.asarray(got), table[np.clip(tokens, 0, _VOCAB - 1)]
                )
                ((name, result),) = collectives(compiled.as_text())
                # XLA for CPUs sums bfloat16 in float32.
                assert name == "all-reduce" and f"[{','.join(map(str, got.shape))}]" in result
        one = Placement(_mesh(4), ShardingRules(vocab=None))
        assert one.rules.shardings(target, one.mesh)[("embed_tokens",)].is_fully_replicated
        target.placement = one
        np.testing.assert_array_equal(np.asarray(target.embed(tokens)), np.asarray(got))


def check_experts(rng):
    """`split_expert_mlp` gives what `expert_mlp` and the shared MLP give, but for the order of the sum."""
    for kind in ("float", "fp8", "int4"):
        layer = random_target(rng, experts=kind, **_TARGET).layers[-1].mlp
        ids = rng.integers(-1, _EXPERTS + 1, (17, 3)).astype(np.int32)
        ids[3] = -1
        weights = rng.random(ids.shape).astype(np.float32)
        for dtype, bound in ((jnp.float32, 2e-6), (jnp.bfloat16, 2.0**-6)):
            x = jnp.asarray(rng.normal(size=(17, 64)), dtype)
            shared = jax.tree.map(
                lambda kernel, dtype=dtype: kernel.astype(dtype), layer.shared_experts
            )
            routed = expert_mlp(x, ids, weights, layer.experts)
            both = routed.astype(jnp.float32) + shared(x).astype(jnp.float32)
            for devices, axis in ((2, "model"), (4, "model"), (4, None)):
                placement = Placement(_mesh(devices), ShardingRules(experts=axis, inner=axis))
                split = functools.partial(split_expert_mlp, placement=placement)

                @quick_compile.jit
                def alone_and_shared(*operands, shared, split=split):
                    return split(*operands, None), split(*operands, shared)

                results = alone_and_shared(x, ids, weights, layer.experts, shared=shared)
                for got, want in zip(results, (routed, both), strict=True):
                    assert got.dtype == dtype and got.sharding.is_fully_replicated
                    error = error_of(got, np.asarray(want, np.float64))
                    assert error < bound, (kind, dtype, devices, error)


def check_whole_operands(rng):
    """The other kernels in a program over a mesh give what they give on one device."""
    batch, depth, vocab, budget, rows = 2, 4, 16, 6, 30
    logits = jnp.asarray(rng.normal(size=(batch, depth, vocab)), jnp.float32)
    roots = jnp.asarray(rng.integers(0, vocab, batch), jnp.int32)
    chosen = jnp.asarray(rng.integers(0, 3, (batch, budget + 1)), jnp.int32)
    lengths = jnp.asarray([5, 17], jnp.int32)
    latents = jnp.asarray(rng.normal(size=(batch, budget + 1, 576)), jnp.float32)
    cache = jnp.asarray(rng.normal(size=(2, batch, rows, 576)), jnp.float32)

    def round_of(logits, roots, chosen, cache, latents, lengths):
        tree = ddtree_jax.tree_build(*ddtree_jax.draft_topk(logits, 6), roots, budget=budget)
        cache = ddtree_jax.append_latents(cache, latents, lengths, layer=1)
        path = ddtree_jax.tree_accept(tree, jnp.where(chosen == 0, tree.tokens[:, 1:2], chosen))
        return tree, path, ddtree_jax.commit_path(cache, path, lengths)

    want = jax.jit(round_of)(logits, roots, chosen, cache, latents, lengths)
    mesh = _mesh(4)
    whole = NamedSharding(mesh, PartitionSpec())
    by_vocab = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    operands = jax.device_put((roots, chosen, cache, latents, lengths), whole)
    run = jax.jit(round_of, donate_argnums=3, out_shardings=whole)
    operands = (jax.device_put(logits, by_vocab), *operands)
    text = run.lower(*operands).compile().as_text()
    jax.tree.map(np.testing.assert_array_equal, run(*operands), want)
    assert collectives(text) == [("all-gather", f"f32[{batch * depth},{vocab}]")], collectives(text)
    assert not cache_copies(text, cache)


def check_greedy_int4(rng):
    """Loaded from files."""
    _saved(rng)
    _check_greedy(rng, *_loaded(), _loaded)


def check_greedy_float(rng):
    target, drafter = random_target(rng, **_TARGET), random_drafter(rng, **_DRAFTER)
    _check_greedy(rng, target, drafter, lambda devices: (_placed(target, devices), drafter))


def _check_greedy(rng, plain, drafter, over):
    """Greedy texts of the models `over(2)` and `over(4)` devices are those of one device, ties counted."""
    lengths = rng.integers(1, 41, 12).astype(np.int32)
    tokens = rng.integers(0, _VOCAB, (12, 40)).astype(np.int32)
    parted = accepted = rounds = 0
    split = [over(devices) for devices in (2, 4)]
    for mode in ("ar", "chain", "ddtree"):
        config = DecodeConfig(mode=mode, budget=12, max_new_tokens=24, prefill_chunk=16)
        result = quick_decode(plain, drafter, tokens, lengths, config=config)
        want = continuations(result, lengths)
        for models in split:
            result = quick_decode(*models, tokens, lengths, config=config)
            parted += ties_between(plain, tokens, lengths, want, continuations(result, lengths))
            if mode == "ddtree":
                histogram = np.asarray(result.accepted_histogram).sum(0)
                accepted += histogram @ np.arange(len(histogram))
                rounds += histogram.sum()
    print("ties", parted, "accepted a round", accepted / rounds)
    assert parted <= 4
    assert accepted / rounds > 1.1  # Else drafts were never accepted and nothing was tested.


def check_sampling(rng):
    """Draws depend on seed, request and position alone, so a mesh changes none; a draw may fall within rounding."""
    _saved(rng)
    lengths = rng.integers(1, 17, 6).astype(np.int32)
    tokens = rng.integers(0, _VOCAB, (6, 16)).astype(np.int32)
    config = DecodeConfig(
        budget=8, max_new_tokens=16, temperature=0.9, top_p=0.9, top_k=7, seed=int(rng.integers(99))
    )
    texts = [
        continuations(quick_decode(*_loaded(devices), tokens, lengths, config=config), lengths)
        for devices in (None, 4)
    ]
    assert sum(a != b for a, b in zip(*texts, strict=True)) <= 1


def check_shard_map(rng):
    """The loop on each device for itself, its requests split: the texts of one device. `shard_map` checks all types."""
    mesh = jax.make_mesh((4,), ("requests",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("requests"), PartitionSpec()
    tokens = rng.integers(0, _VOCAB, (8, 6)).astype(np.int32)
    lengths = rng.integers(1, 7, 8).astype(np.int32)
    small = random_target(rng, **_TARGET), random_drafter(rng, **_DRAFTER)
    sampled = DecodeConfig(budget=4, max_new_tokens=9, temperature=0.9, top_k=9, top_p=0.9)
    curve = CostCurve((1, 3, 7), (1.0, 1.1, 1.2), None, 0.1)
    for models, config in (
        (random_pair(rng), sampled),
        (random_pair(rng), DecodeConfig(mode="chain", max_new_tokens=9, adaptive=False)),
        (small, DecodeConfig(budget=6, max_new_tokens=9, cost_curve=curve)),
    ):

        def run(models, tokens, lengths, config=config):
            first = dataclasses.replace(config, max_rounds=1)
            state = ddtree_decode(*models, tokens, lengths, config=first).state
            return ddtree_decode(*models, tokens, lengths, config=config, state=state).tokens

        over = jax.shard_map(run, mesh=mesh, in_specs=(whole, split, split), out_specs=split)
        want = quick_compile.jit(run)(models, tokens, lengths)
        got = quick_compile.jit(over)(models, tokens, lengths)
        np.testing.assert_array_equal(got, want)


def check_loop(rng):
    """The compiled loop: two sums over devices a layer, one gather of logits, no copy of a cache."""
    _saved(rng)
    target, drafter = _loaded(4)
    for leaf in jax.tree.leaves(nnx.state(drafter)):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 4
    batch, budget = 2, 8
    lengths = np.asarray([7, 20], np.int32)
    tokens = rng.integers(0, _VOCAB, (batch, 20)).astype(np.int32)
    # One pass in the loop's body, whose moves are counted.
    whole = DecodeConfig(budget=budget, max_new_tokens=24, adaptive=False)
    prefill = DecodeConfig(budget=budget, max_new_tokens=24, max_rounds=0)
    operands = (target, drafter, tokens, lengths)
    state = quick_decode(*operands, config=prefill).state
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    parted = quick_decode(*operands, config=whole, state=state)
    at_once = quick_decode(*operands, config=whole)
    np.testing.assert_array_equal(parted.tokens, at_once.tokens)

    decode = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state")
    decode = decode.lower(*operands, config=whole, state=state).compile()
    text = decode.as_text()

    nodes, size, depth = budget + 1, target.hidden_size, drafter.block_size - 1
    moved = collections.Counter(collectives(text))
    gathered = {shape: count for (name, shape), count in moved.items() if name != "all-reduce"}
    assert gathered == {f"f32[{batch * depth},{_VOCAB}]": 1}, moved
    # A layer: one sum ends its attention, one its MLP or its mixture, shared experts included.
    mixtures = moved["all-reduce", f"f32[{batch * nodes},{size}]"]
    others = moved["all-reduce", f"f32[{batch},{nodes},{size}]"]
    assert mixtures == _LAYERS - 1, moved
    assert others == _LAYERS + 1 + 1, moved  # One more for the tree's embedding.
    assert moved["all-reduce", f"f32[{batch},{drafter.block_size},{size}]"] == 1  # The block's.
    # What is left finds the largest logit of each node, without gathering the logits.
    rest = moved.total() - mixtures - others - 2
    small = sum(count for (_, shape), count in moved.items() if f"[{batch},{nodes}]" in shape)
    assert rest == small <= 3, moved

    for path, parameter in nnx.to_flat_state(nnx.state(target)):
        if "experts" in path:
            count, *matrix = parameter.shape
            assert count == _EXPERTS
            assert f"[{','.join(map(str, (count, *matrix)))}]" not in text, path
            assert f"[{','.join(map(str, (count // 4, *matrix)))}]" in text, path
    assert not cache_copies(text, state.cache, state.draft_cache)

    held = [shard.data.unsafe_buffer_pointer() for shard in state.cache.addressable_shards]
    result = decode(*operands, state=state)
    cache = result.state.cache
    assert held == [shard.data.unsafe_buffer_pointer() for shard in cache.addressable_shards]

    # XLA at full effort may round otherwise, so ties may fall otherwise.
    texts = continuations(parted, lengths), continuations(result, lengths)
    assert ties_between(target, tokens, lengths, *texts) <= 1

    # The judge of texts runs the target outside of jit.
    prompt, text = tokens[1, :20].tolist(), continuations(result, lengths)[1]
    assert judge(target, prompt, text, text, jnp.float32) == "same"
    other = [*text[:2], (text[2] + 1) % _VOCAB, *text[3:]]
    assert first_difference(text, other) == 2
    assert judge(target, prompt, text, other, jnp.float32) == "different"


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"](np.random.default_rng(int(sys.argv[2])))
    print("passed")
