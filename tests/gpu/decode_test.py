"""The decode loop on a GPU: the modes agree, and with the documented options it is one CUDA graph."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losslessness import judge
from tiny_models import random_drafter, random_target

from ddtree_jax import DecodeConfig, FinishReason, ddtree_decode
from ddtree_jax.cuda_graphs import whole_loop_options
from ddtree_jax.models import demo, load_drafter, load_target, load_tokenizer

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
decode = jax.jit(ddtree_decode, static_argnames="config")
_SMALL = {"vocab_size": 12, "eos_token_id": 3}
_MASK = {"vocab_size": 12, "dflash_config": {"mask_token_id": 11, "target_layer_ids": [2, 0]}}


def _judge_modes(target, drafter, tokens, lengths, dtype, **options):
    """Runs the three modes; ties counted, anything else an error."""
    texts, rounds = {}, {}
    for mode in ("ar", "chain", "ddtree"):
        config = DecodeConfig(mode=mode, **options)
        result = decode(target, drafter, tokens, lengths, config=config)
        ends = np.asarray(result.lengths)
        texts[mode] = [
            np.asarray(result.tokens[b, n : ends[b]]).tolist() for b, n in enumerate(lengths)
        ]
        rounds[mode] = int(np.asarray(result.rounds).sum())
        assert not np.any(np.asarray(result.finish_reason) == FinishReason.RUNNING)
    ties = 0
    for b, length in enumerate(lengths):
        prompt = np.asarray(tokens)[b, :length].tolist()
        for mode in ("chain", "ddtree"):
            verdict = judge(target, prompt, texts["ar"][b], texts[mode][b], dtype)
            assert verdict != "different", (mode, b, texts["ar"][b], texts[mode][b])
            ties += verdict == "tie"
    print("ties", ties, "rounds", rounds)
    return ties, rounds


def test_modes_agree_on_random_models(rng):
    with jax.default_matmul_precision("highest"):
        for _ in range(2):
            target, drafter = random_target(rng, **_SMALL), random_drafter(rng, **_MASK)
            lengths = rng.integers(1, 65, 20).astype(np.int32)
            tokens = rng.integers(0, 12, (20, 64)).astype(np.int32)
            ties, rounds = _judge_modes(
                target, drafter, tokens, lengths, jnp.float32, max_new_tokens=24, prefill_chunk=32
            )
            assert ties <= 2 and rounds["ddtree"] < rounds["ar"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modes_agree_on_the_demo(dtype):
    with jax.default_matmul_precision("highest"):
        target = load_target(demo.TARGET, dtype=dtype)
        drafter = load_drafter(demo.DRAFTER, target, dtype=dtype)
        tokenizer = load_tokenizer(demo.TARGET)
        prompts = [tokenizer.encode(text)[:64] for text in demo.prompts()[:16]]
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((16, 64), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        ties, rounds = _judge_modes(
            target, drafter, tokens, lengths, jnp.dtype(dtype), max_new_tokens=64
        )
        assert rounds["ddtree"] < rounds["ar"] / 2
        if dtype == "float32":
            assert ties <= 2


def test_no_transfer_and_no_cache_copy(rng):
    target, drafter = random_target(rng), random_drafter(rng)
    tokens = jnp.asarray(rng.integers(0, 50, (2, 16)), jnp.int32)
    lengths = jnp.asarray([16, 9], jnp.int32)
    config = DecodeConfig(max_new_tokens=40, budget=12)
    start = decode(
        target,
        drafter,
        tokens,
        lengths,
        config=DecodeConfig(max_new_tokens=40, budget=12, max_rounds=0),
    )
    lowered = jax.jit(ddtree_decode, static_argnames="config", donate_argnames="state").lower(
        target, drafter, tokens, lengths, config=config, state=start.state
    )
    compiled = lowered.compile()
    text = compiled.as_text()
    caches = [start.state.cache, *jax.tree.leaves(start.state.draft_cache)]
    for shape in {",".join(map(str, cache.shape)) for cache in caches}:
        copies = [line for line in text.splitlines() if f"[{shape}]" in line and " copy(" in line]
        assert not copies, copies
    pointer = start.state.cache.unsafe_buffer_pointer()
    with jax.transfer_guard("disallow"):
        result = compiled(target, drafter, tokens, lengths, state=start.state)
        result.tokens.block_until_ready()
    assert result.state.cache.unsafe_buffer_pointer() == pointer


_CAPTURE = """
import jax, numpy as np
from ddtree_jax import DecodeConfig, ddtree_decode
from ddtree_jax.cuda_graphs import whole_loop_options
from ddtree_jax.models import demo, load_drafter, load_target
target = load_target(demo.TARGET, dtype="bfloat16")
drafter = load_drafter(demo.DRAFTER, target, dtype="bfloat16")
tokens, lengths = np.full((1, 8), 7, np.int32), np.array([8], np.int32)
first = DecodeConfig(max_new_tokens=40, max_rounds=0)
state = jax.jit(ddtree_decode, static_argnames="config")(target, drafter, tokens, lengths, config=first).state
print("LOOP STARTS", flush=True)
decode = jax.jit(ddtree_decode, static_argnames="config", compiler_options=whole_loop_options())
result = decode(target, drafter, tokens, lengths, config=DecodeConfig(max_new_tokens=40), state=state)
print("LENGTH", int(result.lengths[0]), "ROUNDS", int(result.rounds[0]))
"""


def test_the_whole_loop_is_one_cuda_graph(tmp_path):
    """XLA says what it turns into command buffers; the loop itself must be among it."""
    script = tmp_path / "capture.py"
    script.write_text(_CAPTURE)
    environment = {
        **os.environ,
        "TF_CPP_VMODULE": "command_buffer_conversion_pass=3",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = done.stdout + done.stderr
    lines = [line for line in log.splitlines() if "following thunks" in line]
    captured = [line for line in lines if "while" in line.split("following thunks")[-1]]
    pathlib.Path(os.environ.get("DDTREE_CAPTURE_LOG", tmp_path / "log")).write_text(log)
    assert captured, "\n".join(lines[-20:])
    assert set(whole_loop_options()) >= {"xla_gpu_enable_command_buffer"}
