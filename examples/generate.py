"""Continues prompts with a Kimi-K2.6-shaped model, drafting with draft trees.

python examples/generate.py --prompt "def add(a, b):"
python examples/generate.py --compare
python examples/generate.py --checkpoint DIR --drafter DIR --chat --prompt "Hello"
python examples/generate.py --checkpoint DIR --drafter DIR --mesh 8 --prompt "Hello"
"""

from __future__ import annotations

if __name__ == "__main__":
    import interrupt

    interrupt.watch()  # before the imports that take long

import functools
import math

import compiled_programs
import decode_flags
import interrupt
import memory
import model_flags
import program
import prompts
from absl import flags
from ignored import ignored
from one_line_errors import note
from output import output_file

_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; give it again for more.")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file",
    None,
    'A text file that is one prompt, or a .jsonl file of {"prompt": text} lines.',
)
flags.adopt_module_key_flags(model_flags)
_CHAT = flags.DEFINE_bool(
    "chat",
    False,
    "Each prompt is a user's message, put into the checkpoint's chat template; the reply stands below an empty line.",
)
_SYSTEM = flags.DEFINE_string("system", None, "With --chat: a system message before it.")
_THINKING = flags.DEFINE_bool(
    "thinking", True, "With --chat: the model's turn opens with its reasoning."
)
flags.adopt_module_key_flags(decode_flags)
_MESH = flags.DEFINE_integer(
    "mesh",
    1,
    "Devices of this host to split the target over; every one holds the drafter and the caches. With --dry_run any "
    "number, to count with.",
    lower_bound=1,
)
_COMPARE = flags.DEFINE_bool(
    "compare", False, "Run ar, chain and ddtree and print them side by side."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print what the checkpoint takes and whether it fits, and load nothing."
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "Devices that --dry_run counts with; those that JAX sees by default.",
    lower_bound=1,
)
_DEVICE_GB = flags.DEFINE_float(
    "device_gb", None, "Memory of one, in 1e9 bytes; what JAX says by default."
)
_JSON = flags.DEFINE_string("json", None, "Write the completions and the figures to this file.")
_BATCH = flags.DEFINE_integer("batch_size", 1, "Prompts to decode together.", lower_bound=1)
_CACHE = flags.DEFINE_string(
    "compilation_cache",
    "~/.cache/ddtree_jax",
    "Where compiled programs are kept; empty for nowhere.",
)


def main():
    """Checks all flags, and then imports what the decoding needs, which takes seconds."""
    _check()
    memory.check_start()
    for line in ignored(flags.FLAGS):
        note(line)
    if _DRY_RUN.value:
        import dry_run

        on_mesh = _MESH.value if flags.FLAGS["mesh"].present else None
        dry_run.print_report(_DEVICES.value, _DEVICE_GB.value, on_mesh)
        return
    texts = prompts.read(_PROMPT.value, _PROMPT_FILE.value)
    if not texts and model_flags.CHECKPOINT.value is not None:
        raise ValueError("no prompt: give --prompt or --prompt_file")
    json_file = output_file("json", _JSON.value)
    kept_in = compiled_programs.keep(_CACHE.name, _CACHE.value)
    _decode(texts, json_file, kept_in)


def _check():
    """Refuses flags that do not go together, and numbers that no flag's own bounds refuse.

    Raises:
      OSError, ValueError: the message names the flag.
    """
    gb = _DEVICE_GB.value
    if gb is not None and not 0 < gb < math.inf:
        raise ValueError(f"--device_gb must be a number above 0, not {gb}")
    if _DEVICES.value is not None and flags.FLAGS["mesh"].present:
        raise ValueError("--devices and --mesh are two ways to count: give one of them")
    decode_flags.check()
    model_flags.check(_needs_drafter() and not _DRY_RUN.value)


def _needs_drafter() -> bool:
    return _COMPARE.value or decode_flags.MODE.value != "ar"


def _decode(texts, json_file, kept_in):
    """Loads the models, decodes and writes the report."""
    import jax
    from comparing import compare
    from report import Report
    from splitting import check_split, make_mesh
    from streaming import said_compiling, stream

    from ddtree_jax.models import demo

    mesh = make_mesh(_MESH.value)
    if mesh is not None:
        check_split(model_flags.paths()[0], mesh.size, model_flags.IGNORE_CONFIG.value)
    tokenizer = model_flags.load_tokenizer()
    requests = prompts.requests(
        texts or demo.prompts()[: None if _COMPARE.value else 1],
        tokenizer,
        samples=decode_flags.SAMPLES.value,
        chat=_CHAT.value,
        system=_SYSTEM.value,
        thinking=_THINKING.value,
    )
    target, drafter = model_flags.load_pair(_needs_drafter(), mesh)
    prompts.check_lengths(requests, target.max_context, decode_flags.SAMPLES.value)
    config = decode_flags.config(target, tokenizer, jax.default_backend() == "cpu")

    device = jax.devices()[0].device_kind
    device = device if mesh is None else f"{mesh.size} x {device}"
    report = Report(json_file, tokenizer, requests, device)
    interrupt.at_interrupt(lambda: f"interrupted; {report.save_early()}".rstrip("; "))
    kinds = [target.dtype.name, f"cache {target.cache_dtype.name}"]
    told = {
        "batch_size": _BATCH.value,
        "report": report,
        "compiling": functools.partial(said_compiling, kept_in),
        "describe": f"{device} ({', '.join(kinds[: 1 + (target.dtype != target.cache_dtype)])})",
    }
    with report.kept():
        if _COMPARE.value:
            compare(target, drafter, config, requests, **told)
        else:
            stream(target, drafter, tokenizer, config, requests, chat=_CHAT.value, **told)
    report.save()


if __name__ == "__main__":
    program.run(main, hint="a prompt is given as --prompt TEXT")
