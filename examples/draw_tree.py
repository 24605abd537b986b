"""Draws the draft tree of each round and marks the path that the target accepted.

python examples/draw_tree.py --prompt "def add(a, b):"
python examples/draw_tree.py --checkpoint DIR --drafter DIR --prompt "Hello" --budget 32 --rounds 1
"""

from __future__ import annotations

import functools
import sys

from absl import app, flags, logging
from one_line_errors import one_line_errors

_PROMPT = flags.DEFINE_string("prompt", None, "The prompt; the demo's first by default.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder of the target; the demo by default.")
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of the drafter; the demo's by default.")
_BUDGET = flags.DEFINE_integer("budget", 16, "Draft nodes of a tree, root excluded, 0 .. 256.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds to draw, at least 1; fewer if the text ends.")
_SPINE = flags.DEFINE_bool("keep_spine", True, "Force the path of first candidates into the tree.")
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "float32 on a CPU, bfloat16 elsewhere."
)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: the prompt goes into --prompt")
    with one_line_errors():
        _run()


def _run():
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which backends this machine lacks.
    if _ROUNDS.value < 1:
        raise ValueError(f"--rounds must be at least 1, not {_ROUNDS.value}")
    if _CHECKPOINT.value is not None and _DRAFTER.value is None:
        raise ValueError("--checkpoint needs --drafter DIR beside it")
    if _CHECKPOINT.value is not None and _PROMPT.value is None:
        raise ValueError("no prompt: give --prompt")

    import jax
    import numpy as np
    from dtypes import dtypes
    from rich.console import Console
    from tree_picture import picture

    import ddtree_jax
    from ddtree_jax import decode, models
    from ddtree_jax.models import demo

    kinds = dtypes(_DTYPE.value)
    folder = _CHECKPOINT.value or demo.TARGET
    tokenizer = models.load_tokenizer(folder)
    prompt = tokenizer.encode(demo.prompts()[0] if _PROMPT.value is None else _PROMPT.value)
    if not prompt:
        raise ValueError("the prompt is empty: give it some text")
    target = models.load_target(folder, **kinds)
    drafter = models.load_drafter(_DRAFTER.value or demo.DRAFTER, target, **kinds)
    config = ddtree_jax.DecodeConfig(
        budget=_BUDGET.value,
        keep_spine=_SPINE.value,
        max_new_tokens=_ROUNDS.value * drafter.block_size + 1,
        stop_tokens=tuple(tokenizer.stop_ids),
        max_rounds=0,
    )
    start = functools.partial(ddtree_jax.ddtree_decode, config=config)
    state = start(target, drafter, np.int32([prompt]), np.int32([len(prompt)])).state

    @jax.jit
    def one_round(target, drafter, state):
        tree = decode.draft_tree(target, drafter, state, config)
        return tree, *decode.verify_round(target, drafter, state, tree, config)

    console = Console(soft_wrap=True)
    for number in range(1, _ROUNDS.value + 1):
        if int(state.finish_reason[0]) != ddtree_jax.FinishReason.RUNNING:
            break
        tree, state, path = one_round(target, drafter, state)
        emitted = np.asarray(path.tokens[0, : int(path.num_emitted[0])]).tolist()
        console.print(f"round {number}: {int(tree.num_nodes[0])} nodes")
        console.print(picture(tree, path, tokenizer.decode))
        console.print(f"{len(emitted)} tokens: {tokenizer.decode(emitted)!r}\n", markup=False)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    app.run(main)
