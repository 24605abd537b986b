"""The training script's stages at toy size, and the checkpoint that ships."""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys

import demo_corpus
import demo_drafter
import demo_model
import demo_target
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from flax import nnx
from routing import CLEAR, clear_tokens, routing_margin
from tiny_models import random_values

from ddtree_jax.models import DFlashDrafter, KimiK26, load_drafter, load_target, quantization
from ddtree_jax.models import demo as shipped
from ddtree_jax.models.text import SPECIAL_OFFSETS, load_tokenizer

_ROOT = pathlib.Path(__file__).parents[2]
_DEMO = pathlib.Path(shipped.TARGET).parent
_HELD_OUT_LOSS = 2.375  # docs/demo_checkpoint.md: nats a token over the shipped prompts, float32

# Runs train_demo.py on a few dozen modules.
_ON_FEW_MODULES = """
import sys, demo_corpus
from absl import app
everything = demo_corpus.modules()
few = {path: text for path, text in everything.items() if path.startswith(("email/", "json/", "xml/"))}
demo_corpus.modules = lambda: few
import train_demo
app.run(train_demo.main)
"""

# Runs train_demo.py where nobody installed optax.
_WITHOUT_OPTAX = """
import importlib.util, runpy
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "optax" else found(name, package)
runpy.run_path("train_demo.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def demo():
    """The shipped target with float experts, its drafter, both float32, and the tokenizer."""
    target = demo_target.float_experts(load_target(_DEMO / "target", dtype="float32"))
    return (
        target,
        load_drafter(_DEMO / "drafter", target, dtype="float32"),
        load_tokenizer(_DEMO / "target"),
    )


def _toy(rng, kind, config):
    """A random model of the toy sizes."""
    config = config(demo_model.SIZES["toy"])
    return random_values(rng, nnx.eval_shape(lambda: kind(config, dtype=jnp.float32)))


def _prompts(tokenizer) -> list[list[int]]:
    lines = (_DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def test_every_stage_at_toy_size(tmp_path):
    flags = [
        "--size=toy",
        "--minutes_target=0.02",
        "--minutes_drafter=0.02",
        "--lengths=32",
        "--tokens_per_step=128",
        "--steps_per_call=2",
        "--generations=8:32:4:1",
        "--drafter_batch=2",
        "--anchors=2",
        "--prompts=1",
        f"--workdir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _ON_FEW_MODULES, *flags],
        cwd=_ROOT / "examples",
        # It mostly compiles.
        env={
            **os.environ,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "XLA_FLAGS": quick_compile.XLA_FLAGS,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens a round" in done.stdout
    folder = tmp_path / "demo"
    target = load_target(folder / "target")
    drafter = load_drafter(folder / "drafter", target)
    tokenizer = load_tokenizer(folder / "target")
    sizes = demo_model.SIZES["toy"]
    saved = dataclasses.replace(target.config, experts="float")
    assert saved == demo_model.target_config(sizes)
    assert drafter.config.taps == sizes.taps
    assert tokenizer.vocab_size == target.vocab_size
    for name, offset in SPECIAL_OFFSETS.items():
        assert tokenizer.special_ids[name] == sizes.ranks + offset
    generated = np.load(tmp_path / "generated_8.npy")
    assert generated.shape == (4, 32) and generated.max() < target.vocab_size

    # The tokenizer that loads the checkpoint agrees with the one that made the data.
    text = "def f(self):\n        return '你好' + str(12345)  # don't HelloWorld 🎉\n"
    encoding = demo_corpus.read_tiktoken(folder / "target" / "tiktoken.model")
    assert tokenizer.encode(text) == encoding.encode_ordinary(text)
    learned = np.load(tmp_path / "tokens.npz")["learned"]
    end = tokenizer.special_ids["[EOS]"]
    first = tokenizer.decode(learned[: int(np.argmax(learned == end))].tolist())
    assert first == (pathlib.Path(json.__file__).parents[1] / "email/__init__.py").read_text()


def test_a_missing_extra_is_one_line():
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_OPTAX],
        cwd=_ROOT / "examples",
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines() == ["error: optax is missing: pip install -e '.[train]'"]


def test_greedy_continuation_is_the_argmax_of_the_plain_pass(rng):
    import demo_generation

    model = _toy(rng, KimiK26, demo_model.target_config)
    while True:
        prompts = rng.integers(0, model.vocab_size, (3, 5)).astype(np.uint16)
        made = demo_generation.continue_windows(
            *nnx.split(model), prompts, length=12, temperature=np.zeros(3), seed=0
        )
        if routing_margin(model, made) > CLEAR:
            break
    np.testing.assert_array_equal(made[:, :5], prompts)
    inputs = jnp.asarray(made, jnp.int32), jnp.broadcast_to(jnp.arange(12), (3, 12))
    logits = np.asarray(quick_compile.jit(lambda model, *inputs: model(*inputs))(model, *inputs))
    chosen = np.take_along_axis(logits[:, 4:-1], made[:, 5:, None].astype(int), 2)
    np.testing.assert_allclose(chosen[..., 0], np.max(logits[:, 4:-1], axis=-1), atol=1e-4)


def test_fake_quantization_is_what_the_export_stores(rng):
    weight = jnp.asarray(rng.normal(size=(2, 8, 64)), jnp.float32)
    values, scale = quantization.quantize(weight)
    stored = quantization.dequantize(quantization.pack(values), scale, jnp.bfloat16)
    np.testing.assert_array_equal(demo_target.fake_quantize(weight), stored)
    grad = jax.grad(lambda w: jnp.sum(demo_target.fake_quantize(w) * weight))(weight)
    np.testing.assert_array_equal(grad, weight)


def test_router_bias_moves_towards_the_mean():
    params = {"gate": {"e_score_correction_bias": jnp.zeros(4), "kernel": jnp.ones(4)}}
    moved = demo_target.balance(params, [jnp.asarray([0.7, 0.1, 0.0, 0.2])])
    np.testing.assert_allclose(moved["gate"]["e_score_correction_bias"], [-1e-3, 1e-3, 1e-3, 1e-3])
    np.testing.assert_array_equal(moved["gate"]["kernel"], 1.0)


def test_tree_depth_against_all_paths(rng):
    slots, width, budget = 3, 4, 12
    log_probs = np.sort(np.log(rng.dirichlet(np.ones(width), slots)))[:, ::-1]
    paths = {
        path: sum(log_probs[slot, rank] for slot, rank in enumerate(path))
        for depth in range(1, slots + 1)
        for path in itertools.product(range(width), repeat=depth)
    }
    tree = set(sorted(paths, key=paths.get, reverse=True)[:budget])
    for labels in itertools.product(range(width + 1), repeat=slots):
        depth = 0
        while depth < slots and labels[: depth + 1] in tree:
            depth += 1
        assert demo_drafter._tree_depth(log_probs, np.asarray(labels), budget) == depth


def test_training_blocks_see_what_drafting_sees(rng):
    """Many blocks in one masked pass give the logits of one cached draft after another."""
    target = _toy(rng, KimiK26, demo_model.target_config)
    drafter = _toy(rng, DFlashDrafter, demo_model.drafter_config)
    tokens = jnp.asarray(clear_tokens(rng, target, (1, 48)))
    anchors = np.sort(rng.choice(np.arange(1, tokens.shape[1] - 8), 3, replace=False))
    logits, labels = quick_compile.jit(demo_drafter.block_logits)(
        drafter, target, tokens, jnp.asarray(anchors)[None]
    )

    @quick_compile.jit
    def draft(target, drafter, length):
        positions = jnp.arange(tokens.shape[1])[None]
        _, features = target.forward(tokens, positions, taps=drafter.taps)
        cache = drafter.init_cache(1, 64)
        cache = drafter.extend(cache, features, jnp.zeros_like(length), length)
        return drafter.draft(target, cache, tokens[0, length], length)

    logits, labels = np.asarray(logits), np.asarray(labels)
    for i, anchor in enumerate(anchors):
        alone = draft(target, drafter, jnp.full((1,), anchor, jnp.int32))
        np.testing.assert_allclose(logits[:, i], alone, atol=2e-4)
        np.testing.assert_array_equal(labels[0, i], tokens[0, anchor + 1 : anchor + 8])


def test_shipped_checkpoint_predicts_held_out_text(demo):
    target, drafter, tokenizer = demo
    assert isinstance(drafter, DFlashDrafter)
    prompts = _prompts(tokenizer)
    width = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((len(prompts), width), np.int32)
    counted = np.zeros((len(prompts), width - 1), bool)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        counted[i, : len(prompt) - 1] = True
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    logits = jax.jit(lambda target, *inputs: target(*inputs))(target, tokens, positions)
    log_probs = np.asarray(jax.nn.log_softmax(logits))[:, :-1]
    losses = -np.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    assert np.mean(losses[counted]) == pytest.approx(_HELD_OUT_LOSS, rel=0.02)


def test_shipped_checkpoint_is_small_and_its_prompts_are_held_out():
    files = [path for path in _DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25e6
    held_out = (_DEMO / "held_out.txt").read_text(encoding="utf-8").split()
    assert all(demo_corpus.is_held_out(module) for module in held_out)
    lines = (_DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 20
    assert all(json.loads(line)["module"] in held_out for line in lines)


def test_chat_template():
    tokenizer = load_tokenizer(_DEMO / "target")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    text = tokenizer.apply_chat_template(messages, thinking=False)
    assert text == (
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Yes<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>"
    )
