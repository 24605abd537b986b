"""Loads damaged checkpoints, one after another, as generate.py does, and reports each as a line of JSON.

    python tests/load_mutations.py BASE SEED FIRST COUNT

A process of its own, so that its memory can be bounded and what kills it kills no test. A case ends "loads", "error"
with the line that the program would print, or "escaped" with what a user would see as a traceback.
"""

import json
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(_ROOT / "tests"), str(_ROOT / "examples")]

import numpy as np  # noqa: E402
from checkpoint_mutations import add_code, link, mutate  # noqa: E402
from one_line_errors import one_line_errors  # noqa: E402

from ddtree_jax.models import load_drafter, load_target, load_tokenizer  # noqa: E402

_BYTES = 8 * 2**30
_SECONDS = 20
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def _load(folder: pathlib.Path):
    tokenizer = load_tokenizer(folder / "target")
    tokenizer.encode_chat(_MESSAGES)
    tokenizer.decode(tokenizer.encode("def f(x):"), skip_special=True)
    target = load_target(folder / "target", dtype="float32")
    load_drafter(folder / "drafter", target, dtype="float32")


def _outcome(folder: pathlib.Path) -> tuple[str, str]:
    try:
        with one_line_errors():
            _load(folder)
    except SystemExit as end:
        return "error", str(end.code)
    except BaseException as error:
        return "escaped", f"{type(error).__name__}: {error}"[:400]
    return "loads", ""


def _too_long(*_):
    raise TimeoutError(f"still running after {_SECONDS} s of processor time")


def main(base: str, seed: str, first: str, count: str):
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    # Processor time, not the clock's: a busy machine is no hang. A wait without work ends by the test's own limit.
    signal.signal(signal.SIGPROF, _too_long)
    for case in range(int(first), int(first) + int(count)):
        rng = np.random.default_rng([int(seed), case])
        folder = pathlib.Path(tempfile.mkdtemp(prefix="damaged"))
        link(pathlib.Path(base), folder)
        done = mutate(rng, folder)
        add_code(folder)
        print(json.dumps({"case": case, "done": done}), flush=True)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        kind, text = _outcome(folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        row = {"case": case, "kind": kind, "text": text, "seconds": time.process_time() - start}
        print(json.dumps(row), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
