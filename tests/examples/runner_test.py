"""The runner: its text is `ddtree_decode`'s, whatever its program is rounded to and whoever decodes beside."""

import contextlib
import types

import jax
import memory
import numpy as np
import pytest
import quick_compile
import runner
from markov import follow, random_pair, wrong_drafter
from runner import Runner
from sizes import even_batches

from ddtree_jax import DecodeConfig, ddtree_decode


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "compile_options", lambda: quick_compile.OPTIONS)


_decode = quick_compile.jit(ddtree_decode, static_argnames="config")


def _exact(target, drafter, prompt, config):
    """Tokens after the prompt, in a program of just its size, with every setting in the config."""
    result = _decode(target, drafter, np.int32([prompt]), np.int32([len(prompt)]), config=config)
    return np.asarray(result.tokens)[0, len(prompt) : int(result.lengths[0])].tolist()


def test_greedy_text_is_the_tables_whatever_the_program_is_rounded_to(rng):
    target, drafter = random_pair(rng)
    table = np.asarray(target.table)
    prompts = [rng.integers(0, 23, n).tolist() for n in (1, 70, 5, 64)]
    one = Runner(target, drafter, DecodeConfig(budget=6, max_new_tokens=37), 2)
    one.prepare(3, 70)
    seen = []
    for part in ([0], [1, 2, 3], [3, 0]):
        batch = [prompts[i] for i in part]
        for prompt, completion in zip(batch, one.run(batch, on_progress=seen.append), strict=True):
            assert [*prompt, *completion.tokens] == follow(table, prompt, 37)[0]
            assert completion.finish_reason == "length"
            assert completion.mean_accepted == pytest.approx(36 / completion.rounds)
    # The first look shows what the prefill emits.
    assert [len(one.tokens) for one in seen[0]] == [1] and seen[0][0].finish_reason == "running"
    assert one.totals.tokens == 6 * 36 and len(one._programs) == 1


def test_settings_are_in_no_program(rng, monkeypatch):
    """What XLA is given is the same for another seed, temperature, limit and length."""
    target, drafter = random_pair(rng)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: self)
    monkeypatch.setattr(runner, "_fresh_bytes", lambda program: 0)

    def texts(longest=9, **settings):
        one = Runner(target, drafter, DecodeConfig(budget=3, **settings), 1)
        return [program.as_text() for program in one.prepare(2, longest)[:2]]

    drawn = texts(temperature=0.7, seed=1, max_new_tokens=65)
    assert drawn == texts(longest=64, temperature=1.9, seed=-5, max_new_tokens=128)
    assert drawn != texts(temperature=0.7, max_new_tokens=129)
    assert drawn != texts(longest=65, temperature=0.7, max_new_tokens=128)
    assert texts(seed=1, max_new_tokens=1) == texts(seed=2, max_new_tokens=64) != drawn


def test_a_draw_is_that_of_its_seed_temperature_and_number(rng):
    target, drafter = random_pair(rng)
    prompt, other = [3, 1, 4], [1, 5, 9]
    settings = {"budget": 5, "temperature": 1.3, "seed": -7, "max_new_tokens": 29}
    config = DecodeConfig(**settings)
    alone = Runner(target, drafter, config)
    texts = [alone.run([prompt], [number])[0].tokens for number in range(4)]
    assert texts[0] == _exact(target, drafter, prompt, config)
    assert len(set(map(tuple, texts))) == 4
    # Beside others, in another order, in other modes and with looks between the rounds.
    for mode in ("ddtree", "ar"):
        together = Runner(target, drafter, DecodeConfig(**settings, mode=mode), 1)
        got = together.run([other, prompt, prompt, prompt, prompt], [0, 3, 1, 0, 2])
        assert [one.tokens for one in got[1:]] == [texts[i] for i in (3, 1, 0, 2)]
        assert got[0].tokens == _exact(target, drafter, other, config)


def test_rounds_without_a_draft_are_counted(rng):
    target, drafter = random_pair(rng, damage=0.0)
    for pair, seldom in ((drafter, False), (wrong_drafter(target), True)):
        one = Runner(target, pair, DecodeConfig(budget=4, max_new_tokens=100))
        one.run([[1], [2, 3]])
        assert (one.totals.undrafted_rounds > one.totals.rounds // 2) is seldom


def test_what_does_not_fit_when_rounded_is_compiled_as_it_is(rng, monkeypatch):
    target, drafter = random_pair(rng)
    table = np.asarray(target.table)
    # Two layers of 576 numbers: 64 columns for the prompt and 512 for the text take 2.7 MB, 320 for it 1.8 MB.
    monkeypatch.setattr(memory, "free_bytes", lambda: 2_300_000)
    monkeypatch.setattr(memory, "_COMPILER", 0)
    monkeypatch.setattr(runner, "_fresh_bytes", lambda program: 0)
    sizes = []

    def note(prompts, columns):
        sizes.append((prompts, columns))
        return contextlib.nullcontext()

    one = Runner(target, drafter, DecodeConfig(budget=4, max_new_tokens=300), compiling=note)
    (completion,) = one.run([[7]])
    assert [7, *completion.tokens] == follow(table, [7], 300)[0]
    assert sizes == [(1, 64), (1, 64)]

    monkeypatch.setattr(memory, "free_bytes", lambda: 1_000_000)
    short = Runner(target, drafter, DecodeConfig(budget=4, max_new_tokens=300))
    with pytest.raises(MemoryError) as caught:
        short.run([[7]])
    assert str(caught.value) == (
        "out of memory: the caches of 1 requests with 388 positions each take 1.8 MB, and 1.0 MB are free: lower "
        "--batch_size or --max_new_tokens"
    )


@pytest.mark.parametrize(
    "error, line",
    [
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory allocating 1799553024 bytes."
            ),
            "out of memory at 1.80 GB more: lower it",
        ),
        (MemoryError(), "out of memory: lower it"),
        (RuntimeError("std::bad_alloc"), "out of memory: lower it"),
    ],
)
def test_a_failed_allocation_names_the_flag(error, line):
    with pytest.raises(MemoryError) as caught, memory.naming("lower it"):
        raise error
    assert str(caught.value) == line
    with pytest.raises(RuntimeError, match="INVALID"), memory.naming("lower it"):
        raise RuntimeError("INVALID_ARGUMENT")


def test_free_memory_is_the_least_of_what_is_left(monkeypatch):
    for name, left in (("_machine", 9), ("_address_space", None), ("_container", 5)):
        monkeypatch.setattr(memory, name, lambda left=left: left)
    if jax.default_backend() == "cpu":
        assert memory.free_bytes() == 5
    monkeypatch.setattr(memory, "_address_space", lambda: 10**9)
    with pytest.raises(MemoryError, match="ulimit -v leaves 1.00 GB, and JAX takes .* raise it"):
        memory.check_start()


def test_batches_are_sized_alike():
    def sizes(*numbers):
        return [part.stop - part.start for part in even_batches(*numbers)]

    assert sizes(5, 2) == [2, 2, 1] and sizes(65, 64) == [33, 32] and sizes(3, 8) == [3]
    for count in range(1, 40):
        for most in range(1, 12):
            parts = sizes(count, most)
            assert sum(parts) == count and max(parts) <= most
            assert len(parts) == -(-count // most) and min(parts) > 0


def test_prompts_are_counted_in_the_callers_list():
    one = Runner(types.SimpleNamespace(max_context=3), None, DecodeConfig(mode="ar"))
    with pytest.raises(ValueError, match="prompt 9 is empty"):
        one.run([[1], []], first=8)
    with pytest.raises(ValueError, match="prompt 8 has 4 tokens"):
        one.run([[1] * 4], first=8)
