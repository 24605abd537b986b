"""The step suite: sizes and floors by the published model's arithmetic, and one run at toy sizes."""

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import loop_time
import numpy as np
import programs
import pytest
import quick_compile
import round_time
import step_floors
import step_model
import step_suite
from limits import HANG_SECONDS

from ddtree_jax import CostCurve

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "benchmark.py"
_ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compile.XLA_FLAGS}
_RATES = step_floors.Rates(4.42e12, 7.2e14)


def test_bytes_are_the_published_models():
    fixed, mixture = step_model.layer_bytes(step_model.target_config(full=True))
    attention, expert = 101_124_096, 44_040_192
    packed = 384 * expert * 4.5 / 8
    router = 7168 * 384 * 2 + 384 * 4
    assert mixture == pytest.approx(packed + 2 * (attention + expert) + router, rel=1e-4)
    vocabulary, dense = 2 * 163840 * 7168, 3 * 18432 * 7168
    assert fixed == pytest.approx(2 * (vocabulary + attention + dense), rel=1e-4)
    assert step_model.drafter_bytes(step_model.drafter_config(True, 61)) == 2 * 3_479_277_056


def test_floors(monkeypatch):
    """17 nodes that touch 116 of 384 packed experts; and their attention, which is arithmetic."""
    each = 44_040_192 * 4.5 / 8
    # What jax.tree sees of a module are its arrays; a stand-in has their size alone.
    packed = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (int(384 * each),), (0,))
    monkeypatch.setattr(step_floors, "weight_bytes", lambda module: module.packed.nbytes)
    ids = np.arange(17 * 8).reshape(17, 8) % 116
    module = types.SimpleNamespace(count=384, packed=packed)
    floor = step_floors.experts(module, ids, _RATES)
    assert floor == pytest.approx(116 * each / 4.42e12 * 1e6)
    work = 2 * 17 * 64 * (8192 + 17) * 1088
    assert step_floors.attention(1, 8192, 17, 64, _RATES) == pytest.approx(work / 7.2e14 * 1e6)
    short = step_floors.attention(1, 8192, 1, 1, _RATES)
    assert short == pytest.approx(8193 * 1152 / 4.42e12 * 1e6)


def test_no_device_is_asked_before_the_first_call(monkeypatch):
    def ask():
        raise AssertionError("asked")

    monkeypatch.setattr(loop_time, "compile_options", ask)
    monkeypatch.delitem(sys.modules, "step_suite")
    importlib.import_module("step_suite")
    loop = loop_time.TimedLoop(lambda held, state: ((), state))
    with pytest.raises(AssertionError, match="asked"):
        loop((), (), repeats=1)


@pytest.mark.parametrize("known", [False, True])
def test_a_timed_loop_takes_every_step(known):
    """The state has gone through as many steps as were asked for, each with what is held and the operands."""
    counts = []

    def step(held, state, x):
        jax.debug.callback(lambda: counts.append(1))
        return jnp.sin(x), state + held * x

    loop = loop_time.TimedLoop(step, known=known, rounds=(2, 5))
    time, state = loop(jnp.float32(2), jnp.float32(1), jnp.float32(3), repeats=2, least=-1.0)
    jax.effects_barrier()
    assert len(counts) == 3 * 7 + 7 + 2 * 7
    assert float(state) == 1 + 6 * len(counts) and np.isfinite(time)


def test_random_packed_words_have_no_mean():
    """With -8 among them a number is -1/2 in the mean, and after a few layers all tokens go to the same experts."""
    words = np.asarray(step_model.random_experts(4, 64, 32)[0]).view(np.uint32)
    numbers = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(int) - 8
    counts = np.bincount(numbers.ravel() + 8, minlength=16) / numbers.size
    # 16,384 draws: a share of 1/16 deviates by 0.002.
    assert counts[0] == 0 and counts[8] == pytest.approx(2 / 16, abs=0.015)
    assert counts[[*range(1, 8), *range(9, 16)]] == pytest.approx(1 / 16, abs=0.012)


def test_caches_have_room_for_a_tree_and_for_a_block():
    settings = step_suite.Settings(True, None, (1, 4), (32, 16), 2, 1)
    assert step_suite.cache_rows(settings, 8) == 40
    settings = dataclasses.replace(settings, nodes=(1, 17))
    assert step_suite.cache_rows(settings, 8) == 49


def test_a_curve_never_falls():
    steps = [
        step_suite.Step(nodes, 64, 1.0, idle, {}, {}, {"experts": verify}, {})
        for nodes, idle, verify in [(9, 2.0, 5.0), (1, 3.0, 3.5), (4, 2.5, 2.0)]
    ]
    curve = step_suite.cost_curve(steps, draft=1.5)
    assert curve == CostCurve((1, 4, 9), (3.5, 3.5, 5.0), (3.0, 3.0, 3.0), 1.5)


def test_step_suite(tmp_path):
    out = tmp_path / "step.json"
    arguments = ["--suite=step", "--size=small", "--layers=2", "--nodes=1,4", "--prefixes=32"]
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments, "--repeats=3", f"--json={out}"],
        env=_ENVIRONMENT,
        cwd=_SCRIPT.parent,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert [(s["nodes"], s["prefix"]) for s in report["steps"]] == [(1, 32), (4, 32)]
    for step in report["steps"]:
        times, full = step["times"], step["full_times"]
        assert set(times) == set(step_suite.STAGES)
        assert sum(times.values()) > 0 and not step["floors"]
        # Each node goes to two of eight experts.
        assert 2 <= step["touched"] <= min(2 * step["nodes"], 8)
        # Of four layers, of which three are mixtures, two with one mixture were there.
        assert full["head"] == times["head"]
        assert full["verify_attn"] == pytest.approx(2 * times["verify_attn"])
        assert full["experts"] == pytest.approx(3 * times["experts"])
    curve = CostCurve.from_json(out)
    assert curve.nodes == (1, 4)
    assert curve.draft == pytest.approx(report["draft"] + report["machinery"])
    assert curve.verify[0] == pytest.approx(
        max(sum(report["steps"][0]["full_times"].values()), curve.idle[0])
    )
    rounds = report["rounds"]
    assert report["round_nodes"] == 4 and set(rounds["loops"]) == {"default"}
    # A round holds its models; other work on the machine moves either.
    assert rounds["loops"]["default"] > rounds["models"] / 3 > 0
    assert rounds["device"] > rounds["models"] / 3
    assert 0 <= report["overhead"] < 1


def test_overhead_at_full_depth():
    rounds = round_time.RoundTimes({"default": 1080.0, "one graph": 1030.0}, 1040.0, 1000.0)
    # Four times the layers: models 4000, the host 200, the tree's own kernels 40 as before.
    assert step_suite._overhead(rounds, 15, 60) == pytest.approx(240 / 4240)
    alone = round_time.RoundTimes({"default": 1080.0}, 990.0, 1000.0)
    assert step_suite._overhead(alone, 15, 60) == 0


@pytest.mark.parametrize(
    ("flags", "cache"),
    [
        ([], "float32"),
        (["--cache_dtype=float8_e4m3fn", "--param_dtype=bfloat16"], "float8_e4m3fn"),
    ],
)
def test_curve_suite(tmp_path, flags, cache):
    """The demo's own curve, in the file that generate.py reads."""
    out = tmp_path / "curve.json"
    # One difference of loops may be less than nothing where other work comes between.
    arguments = ["--suite=curve", "--nodes=1,3", "--prefixes=40", "--repeats=3", f"--json={out}"]
    arguments += flags
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    curve = CostCurve.from_json(out)
    assert curve.nodes == (1, 3) and curve.draft > 0
    assert all(idle <= full for idle, full in zip(curve.idle, curve.verify, strict=True))
    assert f"cache {cache}" in done.stdout and f"{curve}" in done.stdout


def test_compile_suite(tmp_path):
    out = tmp_path / "compile.json"
    done = programs.run(_SCRIPT, "--suite=compile", "--size=small", "--layers=2", f"--json={out}")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert report["layers"] == 2
    # XLA's part is what grows; all of them took time.
    assert report["compile"] > report["trace"] > 0 and report["lower"] > 0


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--nodes=a,b"], "--nodes must be whole numbers above 0, not a,b"),
        (["--nodes=1,2.5"], "--nodes must be whole numbers above 0, not 1,2.5"),
        (["--nodes="], "--nodes must ascend from 1 to at most 257, not []"),
        (["--nodes=4,9"], "--nodes must ascend from 1 to at most 257, not [4, 9]"),
        (["--nodes=1,9,9"], "--nodes must ascend from 1"),
        (["--nodes=1,258"], "at most 257, not [1, 258]"),
        (["--prefixes=x"], "--prefixes must be whole numbers above 0, not x"),
        (["--prefixes=-3"], "--prefixes must be whole numbers above 0, not -3"),
        (["--prefixes=4090"], "--prefixes 4090 and a pass of 65 nodes are more than the target's"),
        (["--repeats=0"], "--repeats must be at least 1, not 0"),
        (["--batch_size=0"], "--batch_size must be at least 1, not 0"),
        (["--layers=0"], "--layers must be at least 1, not 0"),
        (["--checkpoint=/"], "--checkpoint needs --drafter DIR beside it"),
        (["--checkpoint=/no/such", "--drafter=/"], "--checkpoint /no/such: no such folder"),
    ],
)
def test_bad_flags_are_one_line(flags, words):
    done = programs.run(_SCRIPT, "--suite=curve", *flags)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and words in line
