"""The decode loop on a GPU: the modes agree, and with the documented options it is one CUDA graph."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_model
from flax import nnx
from limits import HANG_SECONDS
from losslessness import judge
from markov import random_pair
from tiny_models import random_drafter, random_target

from ddtree_jax import DecodeConfig, FinishReason, ddtree_decode
from ddtree_jax.cuda_graphs import whole_loop_options
from ddtree_jax.models import DFlashDrafter, demo, load_drafter, load_target, load_tokenizer

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
            assert verdict != "expert tie" or dtype != jnp.float32
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


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        pytest.param("float32", None, id="float32"),
        pytest.param("bfloat16", None, id="bfloat16"),
        pytest.param("bfloat16", "float8_e4m3fn", id="bfloat16-e4m3"),
    ],
)
def test_modes_agree_on_the_demo(dtype, cache_dtype):
    with jax.default_matmul_precision("highest"):
        target = load_target(demo.TARGET, dtype=dtype, cache_dtype=cache_dtype)
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


def test_sampled_text_depends_on_prompt_and_seed_alone(rng):
    target, drafter = random_pair(rng)
    tokens = rng.integers(0, target.vocab_size, (4, 6)).astype(np.int32)
    lengths = rng.integers(1, 7, 4).astype(np.int32)
    options = dict(
        max_new_tokens=30, temperature=0.8, top_k=7, top_p=0.9, seed=int(rng.integers(99))
    )
    texts = {}
    for mode in ("ar", "chain", "ddtree"):
        config = DecodeConfig(mode=mode, budget=9, **options)
        texts[mode] = np.asarray(decode(target, drafter, tokens, lengths, config=config).tokens)
    np.testing.assert_array_equal(texts["chain"], texts["ar"])
    np.testing.assert_array_equal(texts["ddtree"], texts["ar"])
    seed = jnp.int32(12345)
    other = decode(target, drafter, tokens, lengths, config=config, seed=seed).tokens
    assert np.any(np.asarray(other) != texts["ar"])


@pytest.mark.parametrize("options", [{}, whole_loop_options()], ids=["default", "one graph"])
@pytest.mark.parametrize("mode", ["ar", "chain", "ddtree"])
def test_calls_that_donate_the_state_go_on_where_one_call_would(rng, mode, options):
    """XLA for GPUs gave such arrays to the wrong outputs where they left the program twice: jax issue 39625."""
    target, drafter = random_target(rng, **_SMALL), random_drafter(rng, **_MASK)
    lengths = rng.integers(1, 17, 3).astype(np.int32)
    tokens = rng.integers(0, 12, (3, 16)).astype(np.int32)
    config = DecodeConfig(mode=mode, budget=9, max_new_tokens=30)
    with jax.default_matmul_precision("highest"):
        want = jax.tree.map(np.asarray, decode(target, drafter, tokens, lengths, config=config))
        donating = jax.jit(
            ddtree_decode,
            static_argnames="config",
            donate_argnames="state",
            compiler_options=options,
        )
        first = dataclasses.replace(config, max_rounds=0)
        result = donating(target, drafter, tokens, lengths, config=first)
        calls, later = 0, dataclasses.replace(config, max_rounds=4)
        while np.any(np.asarray(result.finish_reason) == FinishReason.RUNNING):
            state = result.state
            result = donating(target, drafter, tokens, lengths, config=later, state=state)
            assert state.cache.is_deleted() and calls < 30
            calls += 1
    assert calls > 1
    for name in ("tokens", "lengths", "rounds", "accepted_histogram", "finish_reason"):
        np.testing.assert_array_equal(getattr(result, name), getattr(want, name), err_msg=name)


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


def test_the_drafters_matrices_are_read_where_they_lie():
    """Of many products with one operand XLA would make one, and for it copy the matrices in every round."""
    config = step_model.drafter_config(True, 61)
    drafter = nnx.eval_shape(lambda: DFlashDrafter(config, dtype=jnp.bfloat16))
    cache = jax.eval_shape(lambda: drafter.init_cache(1, 2048))
    features = jax.ShapeDtypeStruct(
        (1, config.block_size, len(config.taps) * config.hidden_size), jnp.bfloat16
    )
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    extend = jax.jit(DFlashDrafter.extend, donate_argnums=1)
    text = extend.lower(drafter, cache, features, count, count).compile().as_text()
    rows = config.hidden_size
    copies = re.findall(rf"^.* = bf16\[{rows},\d+\]\S* (?:fusion|copy)\(.*", text, re.MULTILINE)
    assert f"bf16[{rows},{config.num_key_value_heads * config.head_dim}]" in text
    assert not copies, copies


_CAPTURE = """
import sys, jax, numpy as np
from tiny_models import random_drafter, random_target
from ddtree_jax import CostCurve, DecodeConfig, ddtree_decode, experts
from ddtree_jax.cuda_graphs import whole_loop_options
from ddtree_jax.models import demo, load_drafter, load_target
experts.CUDA_KERNEL = sys.argv[1] == "demo with the experts' kernel"
if sys.argv[1].startswith("demo"):
    target = load_target(demo.TARGET, dtype="bfloat16")
    drafter = load_drafter(demo.DRAFTER, target, dtype="bfloat16")
else:
    rng = np.random.default_rng(int(sys.argv[2]))
    target, drafter = random_target(rng, first_k_dense_replace=3), random_drafter(rng)
tokens, lengths = np.full((1, 8), 7, np.int32), np.array([8], np.int32)
curve = CostCurve((1, 8, 17), (1.0, 1.2, 1.3)) if sys.argv[1] == "dense in sizes" else None
config = DecodeConfig(max_new_tokens=40, cost_curve=curve)
first = DecodeConfig(max_new_tokens=40, max_rounds=0)
plain = jax.jit(ddtree_decode, static_argnames="config")
state = plain(target, drafter, tokens, lengths, config=first).state
want = plain(target, drafter, tokens, lengths, config=config, state=state)

def whole_loop(target, drafter, tokens, lengths, state):
    return ddtree_decode(target, drafter, tokens, lengths, config=config, state=state)

run = jax.jit(whole_loop, compiler_options=whole_loop_options())
run(target, drafter, tokens, lengths, state).tokens.block_until_ready()  # XLA runs the first call without graphs
print("SECOND CALL", file=sys.stderr, flush=True)
result = run(target, drafter, tokens, lengths, state)
rounds = int(result.rounds[0])
print("END", file=sys.stderr, flush=True)
np.testing.assert_array_equal(result.tokens, want.tokens)
print("ROUNDS", rounds)
"""


@pytest.mark.parametrize(
    "model", ["dense", "dense in sizes", "demo", "demo with the experts' kernel"]
)
def test_the_whole_loop_is_one_cuda_graph(rng, tmp_path, model):
    """No loop is left outside of a command buffer, and a call runs no loop from the host.

    XLA's dump shows what its passes made of the program; its log shows what a call then does.
    """
    script = tmp_path / "capture.py"
    script.write_text(_CAPTURE)
    tests = pathlib.Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path / 'dump'}",
        "TF_CPP_VMODULE": "command_buffer_conversion_pass=3,command_buffer_thunk=3,while_thunk=3",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, str(script), model, str(rng.integers(2**31))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=HANG_SECONDS,
    )
    log = done.stderr
    reasons = [line for line in log.splitlines() if "not convertible" in line]
    assert done.returncode == 0, "\n".join([*reasons, log[-3000:]])
    assert int(done.stdout.split("ROUNDS")[1]) > 1

    dumps = (tmp_path / "dump").glob("*jit_whole_loop*thunk_sequence_after_thunk_passes.txt")
    thunks = max(dumps, key=lambda path: path.stat().st_size).read_text()
    outer = re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE)
    inner = re.findall(r"^ +\d+: (k\w+)", thunks, re.MULTILINE)
    assert "kWhile" not in outer and "kCommandBuffer" in outer, "\n".join(reasons)
    assert "kWhile" in inner

    call = log.split("SECOND CALL")[1].split("END")[0]
    assert "Execute command buffer" in call
    assert "Executing WhileThunk" not in call and "Executing iteration" not in call
