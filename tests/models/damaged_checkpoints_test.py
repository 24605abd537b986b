"""Two thousand damaged checkpoints: each loads, or ends in one line that names a file or a folder of it."""

import json
import os
import pathlib
import subprocess
import sys

import demo_model
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from limits import HANG_SECONDS
from safetensors.numpy import load_file, save_file
from tiny_models import random_values

from ddtree_jax.models import DFlashDrafter, KimiK26, demo, save_drafter, save_target

_TESTS = pathlib.Path(__file__).parents[1]
_CASES = 2000
_AT_A_TIME = 500  # a process: what one leaves behind, it leaves to few


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random pair of the toy sizes: two shards and an index, tokenizer, template."""
    folder, sizes = tmp_path_factory.mktemp("base"), demo_model.SIZES["toy"]
    rng = np.random.default_rng(7)

    def model(kind, config):
        return random_values(rng, nnx.eval_shape(lambda: kind(config(sizes), dtype=jnp.float32)))

    target = folder / "target"
    save_target(
        model(KimiK26, demo_model.target_config), target, token_ids=demo_model.token_ids(sizes)
    )
    save_drafter(model(DFlashDrafter, demo_model.drafter_config), folder / "drafter")
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: shards[i % 2] for i, name in enumerate(sorted(tensors))}
    for shard in shards:
        mine = {name: tensors[name] for name in weight_map if weight_map[name] == shard}
        save_file(mine, target / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    ranks = pathlib.Path(demo.TARGET, "tiktoken.model").read_bytes().splitlines(keepends=True)
    (target / "tiktoken.model").write_bytes(b"".join(ranks[: sizes.ranks]))
    (target / "tokenizer_config.json").write_text(json.dumps(demo_model.tokenizer_json(sizes)))
    (target / "chat_template.jinja").write_text(demo_model.CHAT_TEMPLATE)
    return folder


def _run(base, seed, first, count, where):
    command = [sys.executable, _TESTS / "load_mutations.py", base, seed, first, count]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=where,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(where)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (rows[-1:], done.returncode, done.stderr[-2000:])
    return rows


def test_what_is_whole_loads(base, tmp_path):
    """Else every case below would end in an error, and none would say anything."""
    from ddtree_jax.models import load_drafter, load_target, load_tokenizer

    target = load_target(base / "target", dtype="float32")
    assert (
        load_drafter(base / "drafter", target, dtype="float32").config.vocab_size
        == target.vocab_size
    )
    assert load_tokenizer(base / "target").vocab_size == target.vocab_size


def test_every_damage_ends_in_one_line(base, tmp_path):
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    rows = []
    for first in range(0, _CASES, _AT_A_TIME):
        rows += _run(base, seed, first, _AT_A_TIME, tmp_path)
    done = {row["case"]: row["done"] for row in rows if "done" in row}
    ends = {row["case"]: row for row in rows if "kind" in row}
    assert len(ends) == _CASES
    wrong = []
    for case, row in ends.items():
        line = row["text"]
        one_line = line.startswith("error: ") and "\n" not in line and len(line) < 2000
        named = (
            "damaged" in line
        )  # the folder's name, which every message has to start with or contain
        if row["kind"] == "escaped" or (row["kind"] == "error" and not (one_line and named)):
            wrong.append((case, done[case], row["kind"], line[:300]))
    assert not wrong, (seed, len(wrong), wrong[:10])
    kinds = [row["kind"] for row in ends.values()]
    # Damage that means nothing, a byte of a weight for instance, loads; most does mean something.
    assert 200 < kinds.count("loads") < kinds.count("error")
    assert not list(tmp_path.rglob("EXECUTED"))
