"""Trains the demo checkpoint, target and drafter, on the Python standard library's source.

python examples/train_demo.py --workdir=demo_work                 # every stage, on whatever device JAX finds
python examples/train_demo.py --workdir=demo_work --stage=drafter # one stage again; it reads what the others left
python examples/train_demo.py --workdir=toy --size=toy --minutes_target=0.2 --minutes_drafter=0.2

Stages, in order: `tokenizer` (tiktoken.model), `data` (tokens.npz), `target` (target/, the exported checkpoint),
`generate` (generated_*.npy, the target's continuations), `drafter` (drafter/), `export` (both, into --output).
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import sys

import demo_model
import numpy as np
from absl import app, flags

_STAGES = ("tokenizer", "data", "target", "generate", "drafter", "export")
_STAGE = flags.DEFINE_list("stage", ["all"], "Stages to run, or all of them.")
_WORKDIR = flags.DEFINE_string("workdir", "demo_work", "Where stages leave their results.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "Where `export` puts the checkpoint; workdir/demo by default."
)
_SIZE = flags.DEFINE_enum("size", "demo", list(demo_model.SIZES), "Sizes of the models.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters, windows and draws.")
_MINUTES_TARGET = flags.DEFINE_float("minutes_target", 3.0, "Training time of the target.")
_MINUTES_DRAFTER = flags.DEFINE_float("minutes_drafter", 4.5, "Training time of the drafter.")
_TOKENS_PER_STEP = flags.DEFINE_integer("tokens_per_step", 32768, "The target's batch, in tokens.")
_LENGTHS = flags.DEFINE_list(
    "lengths",
    # The last two fifths of the time are windows of the whole context.
    ["1024", "1024", "1024", "4096", "4096"],
    "Sequence lengths of the target, in order, an equal share of the time each.",
)
_STEPS_PER_CALL = flags.DEFINE_integer("steps_per_call", 20, "Training steps a device program.")
_GENERATIONS = flags.DEFINE_list(
    "generations",
    # Short texts, texts behind a context that is almost full, and long texts of the target's own.
    ["64:576:1024:14", "960:1472:256:10", "1984:2496:128:10", "3456:3968:64:20", "96:2144:256:3"],
    "What `generate` makes: prompt length:length:batch:batches, each; the drafter visits them in turn.",
)
_DRAFTER_BATCH = flags.DEFINE_integer("drafter_batch", 32, "Sequences a step of the drafter.")
_ANCHORS = flags.DEFINE_integer("anchors", 64, "Blocks a sequence of the drafter.")
_PROMPTS = flags.DEFINE_integer("prompts", 32, "Held-out prompts to keep and to replay.")

_SAMPLED_SHARE = 0.25  # of the generated text; the rest is greedy
_SAMPLED_TEMPERATURE = 0.7
_PROMPT_TOKENS = 96
_REPLAYED_TOKENS = 256


def main(argv):
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]!r}")
    missing = [name for name in ("optax", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: {' and '.join(missing)} is missing: pip install -e '.[train]'")
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    sizes = demo_model.SIZES[_SIZE.value]
    stages = {
        "tokenizer": _tokenizer,
        "data": _data,
        "target": _target,
        "generate": _generate,
        "drafter": _drafter,
        "export": _export,
    }
    for name in _STAGES if _STAGE.value == ["all"] else _STAGE.value:
        if name not in stages:
            sys.exit(f"error: --stage={name}: expected some of {', '.join(_STAGES)}, or all")
        print(f"stage {name}", flush=True)
        stages[name](workdir, sizes)


def _split() -> tuple[dict[str, str], dict[str, str]]:
    """Modules to learn from and modules held out."""
    import demo_corpus

    modules = demo_corpus.modules()
    learned = {path: text for path, text in modules.items() if not demo_corpus.is_held_out(path)}
    return learned, {path: text for path, text in modules.items() if path not in learned}


def _tokenizer(workdir, sizes):
    import demo_corpus

    learned, held_out = _split()
    path = workdir / "tiktoken.model"
    trained = demo_corpus.train_tokenizer(list(learned.values()), sizes.ranks, path)
    encoding = demo_corpus.read_tiktoken(path)
    for module, text in held_out.items():
        if encoding.encode_ordinary(text) != trained.encode(text).ids:
            raise ValueError(f"tiktoken and the trained tokenizer disagree on {module}")
    print(f"{sizes.ranks} ranks; tiktoken agrees on {len(held_out)} held-out modules")


def _data(workdir, sizes):
    import demo_corpus

    learned, held_out = _split()
    encoding = demo_corpus.read_tiktoken(workdir / "tiktoken.model")
    tokens = {
        "learned": demo_corpus.encode(list(learned.values()), encoding),
        "held_out": demo_corpus.encode(list(held_out.values()), encoding),
    }
    np.savez(workdir / "tokens.npz", **tokens)
    prompts = demo_corpus.prompts(held_out, encoding, _PROMPTS.value, _PROMPT_TOKENS)
    lines = [json.dumps({"module": module, "prompt": text}) for module, text in prompts]
    (workdir / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (workdir / "held_out.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    for name, stream in tokens.items():
        print(f"{name}: {len(stream)} tokens")


def _target(workdir, sizes):
    import demo_target
    from flax import nnx

    from ddtree_jax.models import save_target

    tokens = np.load(workdir / "tokens.npz")
    graphdef, params = demo_target.train(
        demo_model.target_config(sizes),
        tokens["learned"],
        tokens["held_out"],
        minutes=_MINUTES_TARGET.value,
        seed=_SEED.value,
        lengths=tuple(int(length) for length in _LENGTHS.value),
        tokens_per_step=_TOKENS_PER_STEP.value,
        steps_per_call=_STEPS_PER_CALL.value,
    )
    save_target(
        nnx.merge(graphdef, params), workdir / "target", token_ids=demo_model.token_ids(sizes)
    )
    loss = demo_target.held_out_loss(
        *_frozen_target(workdir), False, tokens["held_out"], int(_LENGTHS.value[0])
    )
    print(f"exported target: held-out loss {loss:.4f} nats a token")


def _frozen_target(workdir):
    """The exported target with its experts as the floats that they stand for."""
    import demo_target
    from flax import nnx

    from ddtree_jax.models import load_target

    return nnx.split(demo_target.float_experts(load_target(workdir / "target")))


def _generate(workdir, sizes):
    import demo_generation

    graphdef, params = _frozen_target(workdir)
    stream = np.load(workdir / "tokens.npz")["learned"]
    rng = np.random.default_rng(_SEED.value)
    for spec in _GENERATIONS.value:
        prompt, length, batch, batches = (int(number) for number in spec.split(":"))
        made = []
        for index in range(batches):
            starts = rng.integers(0, len(stream) - prompt, batch)
            made.append(
                demo_generation.continue_windows(
                    graphdef,
                    params,
                    stream[starts[:, None] + np.arange(prompt)],
                    length=length,
                    temperature=_SAMPLED_TEMPERATURE * (rng.random(batch) < _SAMPLED_SHARE),
                    seed=_SEED.value + index,
                )
            )
            print(f"generated {batch} x {length - prompt} tokens after {prompt}", flush=True)
        np.save(workdir / f"generated_{prompt}.npy", np.concatenate(made))


def _drafter(workdir, sizes):
    import demo_corpus
    import demo_drafter
    import demo_generation
    from flax import nnx

    from ddtree_jax.models import save_drafter

    target = _frozen_target(workdir)
    prompts = [int(spec.split(":")[0]) for spec in _GENERATIONS.value]
    graphdef, params = demo_drafter.train(
        demo_model.drafter_config(sizes),
        *target,
        [(prompt, np.load(workdir / f"generated_{prompt}.npy")) for prompt in prompts],
        minutes=_MINUTES_DRAFTER.value,
        seed=_SEED.value,
        batch=_DRAFTER_BATCH.value,
        anchors=_ANCHORS.value,
        steps_per_call=_STEPS_PER_CALL.value,
    )
    save_drafter(nnx.merge(graphdef, params), workdir / "drafter")

    encoding = demo_corpus.read_tiktoken(workdir / "tiktoken.model")
    lines = (workdir / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [encoding.encode_ordinary(json.loads(line)["prompt"]) for line in lines]
    shortest = min(len(prompt) for prompt in ids)
    replayed = demo_generation.continue_windows(
        *target,
        np.asarray([prompt[-shortest:] for prompt in ids], np.uint16),
        length=shortest + _REPLAYED_TOKENS,
        temperature=np.zeros(len(ids)),
        seed=0,
    )
    chain, tree = demo_drafter.acceptance(graphdef, params, *target, replayed, prompt=shortest)
    print(f"held-out prompts, tokens a round: chain {chain:.3f}, tree of 16 {tree:.3f}")


def _export(workdir, sizes):
    output = pathlib.Path(_OUTPUT.value or workdir / "demo")
    for part in ("target", "drafter"):
        shutil.copytree(workdir / part, output / part, dirs_exist_ok=True)
    target = output / "target"
    shutil.copy(workdir / "tiktoken.model", target)
    config = json.dumps(demo_model.tokenizer_json(sizes), indent=2)
    (target / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    (target / "chat_template.jinja").write_text(demo_model.CHAT_TEMPLATE, encoding="utf-8")
    for name in ("prompts.jsonl", "held_out.txt"):
        shutil.copy(workdir / name, output)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    app.run(main)
