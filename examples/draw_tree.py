"""Draws the draft tree of each round and marks the path that the target accepted.

python examples/draw_tree.py --prompt "def add(a, b):"
python examples/draw_tree.py --checkpoint DIR --drafter DIR --prompt "Hello" --budget 32 --rounds 1
"""

from __future__ import annotations

import functools

import model_flags
import program
from absl import flags
from one_line_errors import show

_PROMPT = flags.DEFINE_string("prompt", None, "The prompt; the demo's first by default.")
flags.adopt_module_key_flags(model_flags)
_BUDGET = flags.DEFINE_integer(
    "budget", 16, "Draft nodes of a tree, root excluded.", lower_bound=0, upper_bound=256
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "Rounds to draw; fewer if the text ends.", lower_bound=1
)
_SPINE = flags.DEFINE_bool("keep_spine", True, "Force the path of first candidates into the tree.")


def main():
    """Draws them."""
    model_flags.check()
    if model_flags.CHECKPOINT.value is not None and _PROMPT.value is None:
        raise ValueError("no prompt: give --prompt")

    import jax
    import numpy as np
    from rich.console import Console
    from tree_picture import picture

    import ddtree_jax
    from ddtree_jax import decode
    from ddtree_jax.models import demo

    tokenizer = model_flags.load_tokenizer()
    prompt = tokenizer.encode(demo.prompts()[0] if _PROMPT.value is None else _PROMPT.value)
    if not prompt:
        raise ValueError("the prompt is empty: give it some text")
    target, drafter = model_flags.load_pair()
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
        with console.capture() as drawn:
            console.print(f"round {number}: {int(tree.num_nodes[0])} nodes")
            console.print(picture(tree, path, tokenizer.decode))
            console.print(f"{len(emitted)} tokens: {tokenizer.decode(emitted)!r}\n", markup=False)
        show(drawn.get())


if __name__ == "__main__":
    program.run(main, hint="the prompt goes into --prompt")
