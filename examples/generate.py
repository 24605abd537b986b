"""Continues prompts with a Kimi-K2.6-shaped model, drafting with draft trees.

python examples/generate.py --prompt "def add(a, b):"
python examples/generate.py --compare
python examples/generate.py --checkpoint DIR --drafter DIR --chat --prompt "Hello"
python examples/generate.py --checkpoint DIR --drafter DIR --mesh 8 --prompt "Hello"
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import sys
import tempfile

from absl import app, flags, logging
from one_line_errors import one_line_errors

_PROMPT = flags.DEFINE_multi_string("prompt", None, "A prompt; give it again for more.")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file",
    None,
    'A text file that is one prompt, or a .jsonl file of {"prompt": text} lines.',
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder of the target; the demo by default.")
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of the drafter; the demo's by default.")
_CHAT = flags.DEFINE_bool("chat", False, "Wrap each prompt in the checkpoint's chat template.")
_MODE = flags.DEFINE_enum("mode", "ddtree", ["ddtree", "chain", "ar"], "How to decode.")
_BUDGET = flags.DEFINE_integer(
    "budget",
    None,
    "Draft nodes of a tree, root excluded, 0 .. 256; the most of them with a cost curve. By default what the curve "
    "goes to; without one 4 on a CPU, where each costs arithmetic, else 16.",
)
_COST_CURVE = flags.DEFINE_string(
    "cost_curve",
    None,
    "File of benchmark.py --suite=curve or step, --json: rounds then verify what pays.",
)
_MAX_NEW = flags.DEFINE_integer("max_new_tokens", 256, "Tokens to emit after each prompt, at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most probable token.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from this share of the probability; 1 is all.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from this many tokens; 0 is all.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "Arithmetic; float32 (in full, no TF32) on a CPU, bfloat16 elsewhere.",
)
_PARAM_DTYPE = flags.DEFINE_enum(
    "param_dtype",
    None,
    ["float32", "bfloat16", "stored"],
    "Weights, packed experts aside: stored keeps what is bfloat16 in the checkpoint so, all else is --dtype's. Stored "
    "for float32 on a CPU that has a kernel for it, else --dtype's.",
)
_CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype",
    None,
    ["float32", "bfloat16", "float8_e4m3fn"],
    "The target's latent cache: --dtype's, which is the default, or float8_e4m3fn for half of bfloat16's bytes. Text "
    "is then the target's over a rounded cache, in every mode.",
)
_MESH = flags.DEFINE_integer(
    "mesh",
    1,
    "Devices of this host to split the target over; every one holds the drafter and the caches. With --dry_run any "
    "number, to count with.",
)
_COMPARE = flags.DEFINE_bool(
    "compare", False, "Run ar, chain and ddtree and print them side by side."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print what the checkpoint takes and whether it fits, and load nothing."
)
_DEVICES = flags.DEFINE_integer(
    "devices", None, "Devices that --dry_run counts with; those that JAX sees by default."
)
_DEVICE_GB = flags.DEFINE_float(
    "device_gb", None, "Memory of one, in 1e9 bytes; what JAX says by default."
)
_JSON = flags.DEFINE_string("json", None, "Write the completions and the figures to this file.")
_BATCH = flags.DEFINE_integer("batch_size", 1, "Prompts to decode together.")
_CACHE = flags.DEFINE_string(
    "compilation_cache",
    "~/.cache/ddtree_jax",
    "Where compiled programs are kept; empty for nowhere.",
)

# Rounds between two looks at the text. A look costs a dispatch; four rounds are a line or so.
_ROUNDS_PER_CALL = 4


def main(argv):
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]!r}: a prompt is given as --prompt TEXT")
    with one_line_errors(TypeError):
        _run()


def _run():
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which backends this machine lacks.
    if _MAX_NEW.value < 1:
        raise ValueError(f"--max_new_tokens must be at least 1, not {_MAX_NEW.value}")
    if _BATCH.value < 1:
        raise ValueError(f"--batch_size must be at least 1, not {_BATCH.value}")
    json_file = _output_file(_JSON.value)
    curve_path = _COST_CURVE.value
    if curve_path is not None and os.path.isdir(curve_path):
        raise ValueError(
            f"--cost_curve {curve_path} is a folder: name a file that benchmark.py --json wrote"
        )

    import jax

    if _CACHE.value:
        _keep_compiled_programs(jax, os.path.expanduser(_CACHE.value))
    from dtypes import dtypes

    import ddtree_jax
    from ddtree_jax import models
    from ddtree_jax.models import demo

    from_demo = _CHECKPOINT.value is None
    if from_demo:
        target_path = demo.TARGET
        drafter_path = _DRAFTER.value or demo.DRAFTER
    else:
        target_path, drafter_path = _CHECKPOINT.value, _DRAFTER.value
    needs_drafter = _COMPARE.value or _MODE.value != "ar"
    if needs_drafter and drafter_path is None and not _DRY_RUN.value:
        raise ValueError("--checkpoint needs --drafter DIR beside it, or --mode=ar")

    if _DRY_RUN.value:
        import dry_run

        seen = jax.devices()
        on_mesh = _MESH.value != 1
        if on_mesh and _DEVICES.value is not None:
            raise ValueError("--devices and --mesh are two ways to count: give one of them")
        devices = _MESH.value if on_mesh else _DEVICES.value
        devices = len(seen) if devices is None else devices
        if on_mesh:
            _check_split(target_path, devices)
        kinds = dtypes(_DTYPE.value, _PARAM_DTYPE.value, devices=devices)
        gb = _DEVICE_GB.value
        if gb is not None and not (math.isfinite(gb) and gb > 0):
            raise ValueError(f"--device_gb must be a number above 0, not {gb}")
        each = dry_run.device_bytes(seen[0]) if gb is None else int(gb * 1e9)
        print(
            dry_run.report(
                target_path,
                drafter_path,
                devices,
                each,
                mesh=on_mesh,
                cache_dtype=_CACHE_DTYPE.value,
                **kinds,
            )
        )
        return
    kinds = dtypes(_DTYPE.value, _PARAM_DTYPE.value)
    if kinds["dtype"] == "float32":
        # A GPU's own default is TF32, which keeps 10 bits of a number and not 23.
        jax.config.update("jax_default_matmul_precision", "highest")
    mesh = _mesh(jax, _MESH.value)
    if mesh is not None:
        _check_split(target_path, mesh.size)
    tokenizer = models.load_tokenizer(target_path)
    prompts, texts = _prompts(tokenizer, from_demo)
    target = models.load_target(target_path, mesh=mesh, cache_dtype=_CACHE_DTYPE.value, **kinds)
    drafter = models.load_drafter(drafter_path, target, **kinds) if needs_drafter else None
    curve = None if curve_path is None else ddtree_jax.CostCurve.from_json(curve_path)
    config = ddtree_jax.DecodeConfig(
        mode=_MODE.value,
        cost_curve=curve,
        budget=_budget(curve, jax.default_backend() == "cpu"),
        # More than the context holds would only make room for what can never be said.
        max_new_tokens=min(_MAX_NEW.value, target.max_context),
        stop_tokens=tuple(tokenizer.stop_ids),
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
    )
    _check_prompts(prompts, target)

    device = jax.devices()[0].device_kind
    if mesh is not None:
        device = f"{mesh.size} x {device}"
    cache = jax.config.jax_compilation_cache_dir
    for line in _notices(_MAX_NEW.value, target.max_context, cache):
        print(line, file=sys.stderr, flush=True)
    decode = _compare if _COMPARE.value else _stream
    report = decode(target, drafter, tokenizer, config, prompts, texts, device)
    if json_file is not None:
        _write(json_file, json.dumps(report, indent=1) + "\n")


def _mesh(jax, devices):
    """The mesh of so many of this host's devices, or None for one."""
    seen = jax.local_devices()
    if not 1 <= devices <= len(seen):
        raise ValueError(
            f"--mesh must lie in 1 .. {len(seen)}, the devices there are, not {devices}"
        )
    if devices == 1:
        return None
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("model",), axis_types=kinds, devices=seen[:devices])


def _check_split(target_path, devices):
    """Refuses a number of devices that the target does not divide by.

    Raises:
      ValueError: such a number, or a config.json that `load_target` would refuse.
    """
    from ddtree_jax.models import KimiK26Config
    from ddtree_jax.models.sharding import split_sizes

    if devices < 1:
        raise ValueError(f"--mesh must be at least 1, not {devices}")
    sizes = split_sizes(KimiK26Config.from_json(target_path))
    wrong = [f"{size} {what}" for what, size in sizes.items() if size % devices]
    if wrong:
        raise ValueError(
            f"--mesh {devices} does not divide the target's {', '.join(wrong)}: give a divisor of "
            f"{math.gcd(*sizes.values())}"
        )


def _notices(max_new, context, cache):
    """Lines before the first text: that it will be shorter than asked for, and what it waits for."""
    if max_new > context:
        yield f"note: the context of {context} tokens ends a text before --max_new_tokens {max_new} does"
    if not cache:
        yield "compiling ..."
    elif not os.path.isdir(cache) or not os.listdir(cache):
        yield f"compiling; the next start finds the programs in {cache} ..."
    else:
        yield f"starting; programs that {cache} lacks are compiled first ..."


def _budget(curve, on_cpu):
    """Draft nodes of a tree, root excluded."""
    if _BUDGET.value is not None:
        return _BUDGET.value
    if curve is not None:
        return curve.nodes[-1] - 1
    return 4 if on_cpu else 16


def _stream(target, drafter, tokenizer, config, prompts, texts, device):
    """Prints each completion as its rounds finish, then one line of figures."""
    from runner import Runner

    runner = Runner(target, drafter, config, _ROUNDS_PER_CALL)
    completions = []
    for start in range(0, len(prompts), _BATCH.value):
        batch = prompts[start : start + _BATCH.value]
        printer = _Printer(tokenizer, texts[start : start + _BATCH.value])
        completions += runner.run(batch, printer.push, first=start)
        printer.finish()
    totals = runner.totals
    _warn(completions)
    print(
        f"{totals.tokens_per_second:.1f} tokens/s, {totals.rounds} rounds, "
        f"{totals.mean_accepted:.2f} tokens accepted a round, {config.mode} on {device} ({_dtypes(target)})"
    )
    return _report(config.mode, device, totals, completions, tokenizer, texts)


def _compare(target, drafter, tokenizer, config, prompts, texts, device):
    """Decodes every prompt in the three modes and prints the figures side by side, a mode's when it is done."""
    import dataclasses

    from losslessness import judge
    from runner import Runner

    sized = "" if config.cost_curve is None else ", fewer where fewer pay"
    print(f"{len(prompts)} prompts on {device} ({_dtypes(target)}), budget {config.budget}{sized}")
    print("mode    tokens/s  speed-up  rounds  accepted a round  same text as ar", flush=True)
    rows, baseline = [], None
    for mode in ("ar", "chain", "ddtree"):
        runner = Runner(target, drafter, dataclasses.replace(config, mode=mode))
        totals, completions = runner.totals, []
        for start in range(0, len(prompts), _BATCH.value):
            completions += runner.run(prompts[start : start + _BATCH.value], first=start)
        if baseline is None:
            baseline, plain_rate = completions, totals.tokens_per_second
        verdicts = [
            judge(target, prompt, ar.tokens, one.tokens, target.dtype)
            for prompt, ar, one in zip(prompts, baseline, completions, strict=True)
        ]
        row = {
            "mode": mode,
            "tokens_per_second": totals.tokens_per_second,
            "speed_up": totals.tokens_per_second / (plain_rate or 1),
            "rounds": totals.rounds,
            "mean_accepted": totals.mean_accepted,
            "same": verdicts.count("same"),
            "ties": verdicts.count("tie"),
            "expert_ties": verdicts.count("expert tie"),
            "different": verdicts.count("different"),
        }
        rows.append(row)
        ties = f", {row['ties']} ties" if row["ties"] else ""
        ties += f", {row['expert_ties']} ties of experts" if row["expert_ties"] else ""
        print(
            f"{mode:<8}{row['tokens_per_second']:>8.1f}{row['speed_up']:>9.2f}x{row['rounds']:>8}"
            f"{row['mean_accepted']:>18.2f}  {row['same']} of {len(prompts)}{ties}",
            flush=True,
        )
    return {**_report(mode, device, totals, completions, tokenizer, texts), "compare": rows}


def _dtypes(target):
    """That of the arithmetic, and the cache's where it is another."""
    own, cache = target.dtype.name, target.cache_dtype.name
    return own if own == cache else f"{own}, cache {cache}"


def _warn(completions):
    for i, one in enumerate(completions):
        if one.finish_reason == "numerical":
            print(f"warning: prompt {i}: the target's logits were not finite", file=sys.stderr)


def _report(mode, device, totals, completions, tokenizer, texts):
    return {
        "mode": mode,
        "device": device,
        "tokens_per_second": totals.tokens_per_second,
        "completions": [
            {
                "prompt": text,
                "text": tokenizer.decode(one.tokens),
                "tokens": one.tokens,
                "finish_reason": one.finish_reason,
                "rounds": one.rounds,
                "mean_accepted": one.mean_accepted,
            }
            for text, one in zip(texts, completions, strict=True)
        ],
    }


class _Printer:
    """Streams the batch's completions in order: each is held back until those before it are done."""

    def __init__(self, tokenizer, texts):
        self._decoders = [tokenizer.stream_decoder() for _ in texts]
        self._held = [text for text in texts]
        self._current = 0
        self._show()

    def push(self, i, ids):
        self._held[i] += self._decoders[i].push(ids)
        if i == self._current:
            self._show()

    def finish(self):
        while self._current < len(self._held):
            self._held[self._current] += self._decoders[self._current].finish()
            self._show()
            print("\n")
            self._current += 1

    def _show(self):
        print(self._held[self._current], end="", flush=True)
        self._held[self._current] = ""


def _prompts(tokenizer, from_demo):
    """The prompts' token ids, and their texts."""
    texts = list(_PROMPT.value or [])
    if _PROMPT_FILE.value is not None:
        path = pathlib.Path(_PROMPT_FILE.value)
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error})") from error
        if path.suffix == ".jsonl":
            for number, line in enumerate(content.split("\n"), 1):
                if line.strip():
                    texts.append(_json_prompt(path, number, line))
            if not texts:
                raise ValueError(f"{path}: holds no prompt")
        else:
            texts.append(content)
    if not texts:
        if not from_demo:
            raise ValueError("no prompt: give --prompt or --prompt_file")
        from ddtree_jax.models import demo

        texts = demo.prompts()
        if not _COMPARE.value:
            texts = texts[:1]
    if _CHAT.value:
        ids = [
            tokenizer.encode(
                tokenizer.apply_chat_template([{"role": "user", "content": text}]),
                allow_special=True,
            )
            for text in texts
        ]
    else:
        ids = [tokenizer.encode(text) for text in texts]
    for i, one in enumerate(ids):
        if not one:
            raise ValueError(f"prompt {i} is empty: give it some text")
    return ids, texts


def _check_prompts(prompts, target):
    """Refuses what cannot be decoded before anything is, so that no finished text is lost to it."""
    for i, prompt in enumerate(prompts):
        if len(prompt) > target.max_context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, but the target's context holds "
                f"{target.max_context}: shorten it"
            )


def _json_prompt(path, number, line):
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{path}, line {number}: not a JSON object with a "prompt"') from error
    if not isinstance(prompt, str):
        raise ValueError(f'{path}, line {number}: "prompt" is not text')
    return prompt


def _output_file(name):
    """The file to write at the end, tried now so that a long decode is not lost to a bad path."""
    if name is None:
        return None
    path = pathlib.Path(name)
    if path.is_dir():
        raise ValueError(f"--json {name} is a folder: name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--json {name}: the folder {path.parent} does not exist")
    path = path.resolve()
    if _is_replaced(path):
        with tempfile.TemporaryFile(dir=path.parent):
            pass  # What is there stays until the new one is whole.
    return path


def _is_replaced(path):
    """Whether a file is put in the place of `path`; a pipe or a device is written to as it is."""
    return path.is_file() or not path.exists()


def _write(path, text):
    """Writes all of `text` or leaves what was there."""
    if not _is_replaced(path):
        path.write_text(text, encoding="utf-8")
        return
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, whole)
        os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)


def _keep_compiled_programs(jax, folder):
    """A second start finds what the first compiled. An explicit JAX_COMPILATION_CACHE_DIR wins."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    app.run(main)
