"""Parameters of another dtype than the arithmetic: what they are held in, what meets them, and that values are kept."""

import dataclasses
import functools
import json

import fp8_folder
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quick_compile
from flax import nnx
from published_configs import toy
from safetensors.numpy import load_file, save_file
from tiny_models import positions_of, random_drafter, random_target, random_values

from ddtree_jax import DecodeConfig, chain_tree, ddtree_decode
from ddtree_jax.models import (
    DFlashDrafter,
    KimiK26,
    demo,
    load_drafter,
    load_target,
    load_tokenizer,
    save_drafter,
    save_target,
)
from ddtree_jax.models.footprint import footprint

_F32, _BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
_KINDS = [
    ("float", {}),
    ("int4", {"q_lora_rank": None}),
    ("fp8", {"tie_word_embeddings": True, "n_shared_experts": 0}),
]
# What moves or widens numbers and computes none.
_MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "gather",
    "reshape",
    "select_n",
    "slice",
    "squeeze",
    "transpose",
}
_CALLS = {
    "custom_jvp_call",
    "jit",
    "pjit",
    "while",
    "cond",
    "scan",
    "custom_vjp_call",
    "closed_call",
}


def _target(rng, dtype, param_dtype, experts="float", **changes):
    config = random_target(rng, experts=experts, **changes).config
    kinds = {"dtype": dtype, "param_dtype": param_dtype}
    return random_values(rng, nnx.eval_shape(lambda: KimiK26(config, **kinds)))


def _drafter(rng, dtype, param_dtype):
    config = random_drafter(rng).config
    kinds = {"dtype": dtype, "param_dtype": param_dtype}
    return random_values(rng, nnx.eval_shape(lambda: DFlashDrafter(config, **kinds)))


def _in(model, make, dtype):
    """The model with its values in parameters, and arithmetic, of `dtype`, but for the router, which is in float32."""
    other = nnx.eval_shape(lambda: make(dtype=dtype))
    slots = nnx.to_flat_state(nnx.state(other))
    values = dict(nnx.to_flat_state(nnx.state(model)))
    for path, slot in slots:
        value = values[path][...]
        slot.set_value(value if path[-2:] == ("gate", "kernel") else value.astype(slot.dtype))
    return other


def _passes(target, drafter, tokens):
    """Everything that the two models compute, by name."""
    batch, nodes = tokens.shape
    lengths = jnp.full((batch,), 3, jnp.int32)
    tree = chain_tree(tokens, jnp.full((batch,), nodes, jnp.int32))
    cache = jax.tree.map(lambda x: x + 0.5, target.init_cache(batch, 20))
    hidden, features, cache = target.verify(tree, cache, lengths, taps=drafter.taps)
    context = drafter.extend(drafter.init_cache(batch, 20), features, lengths * 0, lengths)
    whole, tapped = target.forward(tokens, positions_of(tokens), taps=drafter.taps)
    block = target.embed(tokens[:, :2])
    mask = jnp.ones((batch, 2, nodes + 2), bool)
    blocks = drafter.forward(block, positions_of(block[..., 0]), tapped, positions_of(tokens), mask)
    return {
        "hidden": hidden,
        "features": features,
        "cache": cache,
        "forward": whole,
        "tapped": tapped,
        "logits": target.head(hidden),
        "context": context,
        "drafted": drafter.draft(target, context, tokens[:, 0], lengths),
        "blocks": blocks,
        "block logits": drafter.logits(target, blocks),
    }


def _models(rng, dtype, param_dtype, experts, changes):
    return (
        _target(rng, dtype, param_dtype, experts, **changes),
        _drafter(rng, dtype, param_dtype),
    )


@pytest.mark.parametrize("experts, changes", _KINDS)
@pytest.mark.parametrize("dtype, param_dtype", [(_F32, _BF16), (_BF16, _F32)])
def test_a_pass_is_that_of_the_rounded_weights_in_the_dtype(
    rng, experts, changes, dtype, param_dtype
):
    target, drafter = _models(rng, dtype, param_dtype, experts, changes)
    # The same weights, rounded to the narrower of the two beforehand, in a model of one dtype.
    config, draft = target.config, drafter.config
    plain = _in(target, functools.partial(KimiK26, config, experts=experts), dtype)
    alike = _in(drafter, functools.partial(DFlashDrafter, draft), dtype)
    tokens = jnp.asarray(rng.integers(0, target.vocab_size, (2, 5)), jnp.int32)
    # As it likes, XLA skips the rounding of what it widens again.
    exact = {**quick_compile.OPTIONS, "xla_allow_excess_precision": False}
    run = jax.jit(_passes, compiler_options=exact)
    got, want = run(target, drafter, tokens), run(plain, alike, tokens)
    for name in want:
        for one, other in zip(*map(jax.tree.leaves, (got[name], want[name])), strict=True):
            assert one.dtype == other.dtype, name
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            # Of bfloat16 both compute the same operations on the same numbers.
            bound = 1e-5 * np.abs(other).max() if dtype == _F32 else 0
            np.testing.assert_allclose(one, other, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("experts, changes", _KINDS)
@pytest.mark.parametrize("dtype, param_dtype", [(_F32, _BF16), (_BF16, _F32), (_BF16, None)])
def test_parameters_are_of_the_one_and_results_of_the_other(
    rng, experts, changes, dtype, param_dtype
):
    target, drafter = _models(rng, dtype, param_dtype, experts, changes)
    held = param_dtype or dtype
    seen = set()
    for model in (target, drafter):
        for path, value in nnx.to_flat_state(nnx.state(model)):
            own = "e_score_correction_bias" if path[-1] == "e_score_correction_bias" else None
            own = own or ("experts" in path and experts != "float" and path[-1])
            seen.add(own)
            assert own or value.dtype == held, path
            assert own != "e_score_correction_bias" or value.dtype == _F32
    assert "e_score_correction_bias" in seen
    assert target.dtype == drafter.dtype == target.cache_dtype == dtype
    tokens = jnp.zeros((2, 5), jnp.int32)
    for name, result in jax.eval_shape(_passes, target, drafter, tokens).items():
        wanted = _F32 if "logits" in name or name == "drafted" else dtype
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {wanted}, name


def test_bfloat16_weights_are_widened_and_nothing_is_computed_in_bfloat16(rng):
    target, drafter = _models(rng, _F32, _BF16, "float", {})
    tokens = jnp.zeros((2, 5), jnp.int32)
    jaxpr = jax.make_jaxpr(_passes)(target, drafter, tokens)
    computed, narrow = _results(jaxpr.jaxpr)
    assert {"dot_general", "exp", "rsqrt", "verify_attn"} <= computed
    assert narrow <= _MOVES, narrow


def _results(jaxpr) -> tuple[set[str], set[str]]:
    """Primitives in a jaxpr and in those that it calls, and those of them with a result in bfloat16."""
    every, narrow = set(), set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = [p for p in jax.tree.leaves(tuple(equation.params.values())) if hasattr(p, "eqns")]
        inner += [
            p.jaxpr for p in jax.tree.leaves(tuple(equation.params.values())) if hasattr(p, "jaxpr")
        ]
        for one in inner:
            below = _results(one)
            every |= below[0]
            narrow |= below[1]
        if inner and name in _CALLS:
            continue
        every.add(name)
        if any(getattr(v.aval, "dtype", None) == _BF16 for v in equation.outvars):
            narrow.add(name)
    return every, narrow


def test_gradients_reach_narrow_parameters_in_their_dtype(rng):
    target = _target(rng, _F32, _BF16)
    tokens = jnp.asarray(rng.integers(0, target.vocab_size, (2, 6)), jnp.int32)
    loss = quick_compile.jit(jax.grad(lambda m: jnp.mean(m(tokens, positions_of(tokens)) ** 2)))
    gradients = loss(target)
    for got, parameter in zip(*map(jax.tree.leaves, (gradients, target)), strict=True):
        assert got.dtype == parameter.dtype and np.all(np.isfinite(np.asarray(got, np.float32)))


@pytest.fixture
def folder(rng, tmp_path):
    """A pair as it is saved, in bfloat16, but for a norm and some projections, which are in float32."""
    save_target(random_target(rng), tmp_path / "target")
    save_drafter(random_drafter(rng), tmp_path / "drafter")
    for part, names in (("target", _WIDE_IN_TARGET), ("drafter", _WIDE_IN_DRAFTER)):
        file = tmp_path / part / "model.safetensors"
        tensors = load_file(file)
        for name in names:
            # Numbers that bfloat16 has not.
            tensors[name] = tensors[name].astype(np.float32) * np.float32(1.001)
        save_file(tensors, file)
    return tmp_path


_WIDE_IN_TARGET = {
    "language_model.model.norm.weight",
    "language_model.model.layers.0.mlp.up_proj.weight",
    "language_model.model.layers.1.self_attn.kv_b_proj.weight",
}
_WIDE_IN_DRAFTER = {"layers.1.self_attn.k_proj.weight"}
_WIDE_PATHS = {
    ("norm", "weight"),
    ("layers", 0, "mlp", "up_proj", "kernel"),
    ("layers", 1, "self_attn", "kv_b_proj", "k_up"),
    ("layers", 1, "self_attn", "kv_b_proj", "v_up"),
}


def _state(model):
    return {path: value[...] for path, value in nnx.to_flat_state(nnx.state(model))}


def _load(folder, **kinds):
    target = load_target(folder / "target", **kinds)
    return target, load_drafter(folder / "drafter", target, **kinds)


def test_stored_keeps_every_value_in_as_few_bytes(folder):
    pair = _load(folder, dtype="float32", param_dtype="stored")
    wide_paths = (_WIDE_PATHS, {("layers", 1, "self_attn", "k_proj", "kernel")})
    for got, want, wide in zip(pair, _load(folder, dtype="float32"), wide_paths, strict=True):
        assert got.dtype == _F32
        want = _state(want)
        for path, value in _state(got).items():
            np.testing.assert_array_equal(
                value.astype(want[path].dtype), want[path], err_msg=str(path)
            )
            own = path[-1] == "e_score_correction_bias" or "experts" in path
            assert own or value.dtype == (_F32 if path in wide else _BF16), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_asked_for_is_rounded_once(folder, dtype):
    """Whatever the arithmetic: the numbers that `dtype` alone would give."""
    for param_dtype in ("float32", "bfloat16"):
        pair = _load(folder, dtype=dtype, param_dtype=param_dtype)
        for got, want in zip(pair, _load(folder, dtype=param_dtype), strict=True):
            assert got.dtype == dtype
            want = _state(want)
            for path, value in _state(got).items():
                assert value.dtype == want[path].dtype, path
                np.testing.assert_array_equal(value, want[path], err_msg=str(path))


def test_in_bfloat16_stored_is_bfloat16(folder):
    for model in _load(folder, dtype="bfloat16", param_dtype="stored"):
        for path, value in _state(model).items():
            own = path[-1] == "e_score_correction_bias" or "experts" in path
            assert own or value.dtype == _BF16, path


def test_layers_stored_in_fp8_become_the_dtype(rng, tmp_path):
    config = {**toy("K2-Instruct"), "num_hidden_layers": 2}
    tensors = fp8_folder.random_tensors(rng, config)
    fp8_folder.write(tmp_path, config, tensors)
    stored = _state(load_target(tmp_path, dtype="float32", param_dtype="stored"))
    want = _state(load_target(tmp_path, dtype="float32"))
    for path, value in stored.items():
        np.testing.assert_array_equal(value.astype(want[path].dtype), want[path], err_msg=str(path))
        if "experts" in path or path[-1] == "e_score_correction_bias":
            continue
        linear = path[-1] in ("k_up", "v_up") or "_proj" in str(path[-2:-1])
        assert value.dtype == (_F32 if linear else _BF16), path
    said = json.loads((tmp_path / "config.json").read_text())
    said = "bfloat16" in (said.get("torch_dtype"), said.get("dtype"))
    size = footprint(tmp_path, dtype="float32", param_dtype="stored")
    held = sum(value.nbytes for value in stored.values())
    assert said and size.experts + size.rest == held


@pytest.mark.parametrize("param_dtype", ["stored", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_footprint_counts_what_is_held(dtype, param_dtype):
    kinds = {"dtype": dtype, "param_dtype": param_dtype}
    size = footprint(demo.TARGET, demo.DRAFTER, **kinds)
    target = load_target(demo.TARGET, **kinds)
    drafter = load_drafter(demo.DRAFTER, target, **kinds)
    held = [sum(value.nbytes for value in _state(model).values()) for model in (target, drafter)]
    assert [size.experts + size.rest, size.drafter] == held
    caches = target.init_cache(3, 50), drafter.init_cache(3, 50)
    assert size.row * 150 == sum(x.nbytes for x in jax.tree.leaves(caches))


def test_footprint_of_a_config_that_does_not_say(tmp_path):
    config = json.loads((demo.TARGET / "config.json").read_text())
    for section in (config, config["text_config"]):
        del section["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    wide = footprint(tmp_path, dtype="float32")
    assert footprint(tmp_path, dtype="float32", param_dtype="stored") == wide
    assert footprint(demo.TARGET, dtype="float32", param_dtype="stored").rest < 0.51 * wide.rest


def test_the_demo_says_the_same_with_its_weights_as_they_are_stored():
    """Tokens of every mode, and logits within rounding of float32."""
    pairs = []
    for param_dtype in (None, "stored"):
        kinds = {"dtype": "float32", "param_dtype": param_dtype}
        target = load_target(demo.TARGET, **kinds)
        pairs.append((target, load_drafter(demo.DRAFTER, target, **kinds)))
    half = [value for value in _state(pairs[1][0]).values() if value.dtype == _BF16]
    assert sum(value.nbytes for value in half) > 0.8 * sum(
        v.nbytes for v in _state(pairs[1][0]).values()
    )

    tokenizer = load_tokenizer(demo.TARGET)
    ids = [tokenizer.encode(prompt)[:48] for prompt in demo.prompts()[:4]]
    lengths = np.asarray([len(one) for one in ids], np.int32)
    prompts = np.zeros((4, 48), np.int32)
    for row, one in zip(prompts, ids, strict=True):
        row[: len(one)] = one
    run = jax.jit(lambda target, tokens: target(tokens, positions_of(tokens)))
    wide, stored = (np.asarray(run(target, prompts)) for target, _ in pairs)
    np.testing.assert_allclose(stored, wide, rtol=0, atol=1e-4)

    decode = jax.jit(ddtree_decode, static_argnames="config")
    config = DecodeConfig(budget=8, max_new_tokens=24, stop_tokens=tuple(tokenizer.stop_ids))
    texts = [
        np.asarray(
            decode(*pair, prompts, lengths, config=dataclasses.replace(config, mode=mode)).tokens
        )
        for mode in ("ar", "chain", "ddtree")
        for pair in pairs
    ]
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])


@pytest.mark.parametrize("value", ["int4", "float16", ml_dtypes.float8_e4m3fn, 3.5, object()])
def test_other_dtypes_are_refused(rng, folder, value):
    config, draft = random_target(rng).config, random_drafter(rng).config
    said = "must be 'float32'(, 'bfloat16')? or '(bfloat16|stored)', not"
    for name in ("dtype", "param_dtype"):
        message = f"^{name} {said}"
        target = load_target(folder / "target")
        for make in (
            lambda **kinds: KimiK26(config, **kinds),
            lambda **kinds: DFlashDrafter(draft, **kinds),
            lambda **kinds: load_target(folder / "target", **kinds),
            lambda target=target, **kinds: load_drafter(folder / "drafter", target, **kinds),
            lambda **kinds: footprint(demo.TARGET, **kinds),
        ):
            with pytest.raises(ValueError, match=message):
                make(**{name: value})
    with pytest.raises(ValueError, match="^dtype must be 'float32' or 'bfloat16', not 'stored'"):
        load_target(folder / "target", dtype="stored")
    with pytest.raises(ValueError, match="^param_dtype must be .* or 'bfloat16', not 'stored'"):
        KimiK26(config, param_dtype="stored")
