"""The drawing of draft trees: what it says of a tree, and that its rounds are those of the decode loop."""

import ast
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import programs
import pytest
import quick_compile
from rich.console import Console
from tree_picture import picture

from ddtree_jax import AcceptedPath, DecodeConfig, ddtree_decode, models, tree_build
from ddtree_jax.models import demo

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "draw_tree.py"


def _run(*arguments):
    return programs.run(_SCRIPT, *arguments, env={"XLA_FLAGS": quick_compile.XLA_FLAGS})


def test_picture_names_shares_order_and_path():
    # Two positions of two candidates: 3/4 and 1/4, then 5/8 and 3/8; pop order by hand.
    log_probs = jnp.log(jnp.asarray([[[0.75, 0.25], [0.625, 0.375]]], jnp.float32))
    ids = jnp.asarray([[[10, 11], [12, 13]]], jnp.int32)
    tree = tree_build(log_probs, ids, jnp.asarray([9], jnp.int32), budget=4)
    path = AcceptedPath(
        nodes=jnp.asarray([[0, 1, 3]], jnp.int32),
        tokens=jnp.asarray([[10, 13, 7]], jnp.int32),
        num_emitted=jnp.asarray([3], jnp.int32),
        finished=jnp.asarray([False]),
    )
    console = Console(width=80, record=True, file=open(os.devnull, "w"))
    console.print(picture(tree, path, lambda ids: "".join(f"<{i}>" for i in ids)))
    assert console.export_text().rstrip().splitlines() == [
        "* '<9>'",
        "├── * '<10>'  75.0%  #1",
        "│   ├── '<12>'  62.5%  #2",
        "│   └── * '<13>'  37.5%  #3",
        "└── '<11>'  25.0%  #4",
    ]


def test_rounds_are_those_of_the_decode_loop():
    prompt = "import os\n\ndef read(path):\n"
    done = _run(f"--prompt={prompt}", "--rounds=3", "--budget=12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 13 nodes") == 3
    emitted = [
        ast.literal_eval(line.split(" tokens: ", 1)[1])
        for line in done.stdout.splitlines()
        if " tokens: " in line
    ]
    tokenizer = models.load_tokenizer(demo.TARGET)
    target = models.load_target(demo.TARGET, dtype="float32")
    ids = tokenizer.encode(prompt)
    config = DecodeConfig(mode="ar", max_new_tokens=40)
    decode = quick_compile.jit(ddtree_decode, static_argnames="config")
    result = decode(target, None, np.int32([ids]), np.int32([len(ids)]), config=config)
    first = np.asarray(result.tokens[0, len(ids) :])
    # The prefill emits the first token, the root of the first tree.
    assert tokenizer.decode(first[1:].tolist()).startswith("".join(emitted))
    assert len(emitted) == 3


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--rounds=0"], ["--rounds=0: 0 is not a positive integer"]),
        (["--budget=257"], ["budget", "256"]),
        (["--prompt="], ["empty"]),
        ([f"--checkpoint={demo.TARGET}"], ["--drafter"]),
        ([f"--checkpoint={demo.TARGET}", f"--drafter={demo.DRAFTER}"], ["--prompt"]),
        (["--checkpoint=/no/such", "--drafter=/no/such", "--prompt=x"], ["/no/such"]),
    ],
)
def test_bad_flags(arguments, words):
    done = _run(*arguments)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0]
