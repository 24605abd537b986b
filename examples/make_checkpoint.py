"""Writes a random checkpoint of any size in the published layout, to try a loader or a machine with.

    python make_checkpoint.py --config=Kimi-K2.6/config.json --layers=2 --output=two_layers

The names, shapes, dtypes and packing are those of the real one's language model; only the numbers mean
nothing. A shard at a time is in memory, and while a float tensor is made, twice its float32 size.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time

import numpy as np
import program
from absl import flags

_CONFIG = flags.DEFINE_string("config", None, "A config.json; the demo's by default.")
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must be empty or new.")
_LAYERS = flags.DEFINE_integer("layers", None, "Layers to write; all by default.")
_SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "Size of a shard, in 1e9 bytes, at most.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the numbers.")

_TOKENIZER = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")
_STD = 0.02  # of the weights
_FP8_STD = 100.0  # of the numbers that stand for them, in a range of 448


def main():
    """Writes it."""
    from ddtree_jax.models import demo

    if _OUTPUT.value is None:
        raise ValueError("--output is missing: name the folder to write")
    source = pathlib.Path(_CONFIG.value or pathlib.Path(demo.TARGET) / "config.json")
    output = pathlib.Path(_OUTPUT.value)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output={output} exists and is not an empty folder: choose another")
    if not (math.isfinite(_SHARD_GB.value) and _SHARD_GB.value > 0):
        raise ValueError(f"--shard_gb must be a number above 0, not {_SHARD_GB.value}")
    start = time.perf_counter()
    written, shards = make_checkpoint(
        source,
        output,
        layers=_LAYERS.value,
        shard_bytes=int(_SHARD_GB.value * 1e9),
        rng=np.random.default_rng(_SEED.value),
    )
    seconds = time.perf_counter() - start
    print(
        f"{written / 1e9:.2f} GB in {shards} shards to {output} in {seconds:.1f} s "
        f"({written / 1e9 / seconds:.2f} GB/s)"
    )


def make_checkpoint(
    source: pathlib.Path,
    output: pathlib.Path,
    *,
    layers: int | None,
    shard_bytes: int,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Writes the checkpoint that a config.json describes, with random numbers.

    Args:
      source: the config.json; the tokenizer's files beside it are copied.
      output: the folder, made if needed.
      layers: layers to write, for `num_hidden_layers`; None for all.
      shard_bytes: a shard's tensors take no more, or are one tensor.
      rng: source of the numbers.

    Returns:
      Bytes of all tensors, and shards.

    Raises:
      ValueError: a config that `load_target` would refuse, a layer count that it lacks, or a disk
        without room.
    """
    from ddtree_jax.models import KimiK26Config

    # All is checked before anything is written: a folder that holds something is refused next time.
    with tempfile.TemporaryDirectory() as scratch:
        config = pathlib.Path(scratch) / "config.json"
        config.write_bytes(source.read_bytes())
        have = KimiK26Config.from_json(scratch).num_hidden_layers
        settings = json.loads(config.read_text(encoding="utf-8"))
        text = settings.get("text_config", settings)
        if layers is not None:
            if not 1 <= layers <= have:
                raise ValueError(f"--layers must be 1 .. {have}, the config's layers, not {layers}")
            text["num_hidden_layers"] = layers
        text["num_nextn_predict_layers"] = 0
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        tensors = _tensors(scratch, "language_model." if text is not settings else "")
        total = sum(size for _, _, _, size in tensors)
        existing = next(p for p in (output.absolute(), *output.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if total > free:
            raise ValueError(
                f"{output}: the tensors take {total / 1e9:.1f} GB, the disk has {free / 1e9:.1f} "
                "GB left: choose fewer --layers"
            )
        output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, output / "config.json")
    for name in (*_TOKENIZER, "generation_config.json"):
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, output / name)
    shards = _shards(tensors, shard_bytes)
    _write(output, shards, total, rng)
    return total, len(shards)


def _tensors(folder: str, prefix: str) -> list[tuple]:
    """(name, shape, dtype or values, bytes) of all tensors, layer by layer."""
    import jax.numpy as jnp
    from flax import nnx

    from ddtree_jax.models import KimiK26, KimiK26Config
    from ddtree_jax.models.layout import target_rules
    from ddtree_jax.models.tensors import DTYPES

    config = KimiK26Config.from_json(folder)
    target = nnx.eval_shape(lambda: KimiK26(config, dtype=jnp.bfloat16))
    tensors = []
    for rule in target_rules(target):
        for source in rule.sources:
            dtype = "F32" if source.name.endswith("e_score_correction_bias") else source.dtypes[0]
            scales = [source.block_scales] if source.in_blocks(dtype) else []
            for one, stored in ((source, dtype), *((scale, scale.dtypes[0]) for scale in scales)):
                size = math.prod(one.shape) * DTYPES[stored].itemsize
                tensors.append((prefix + one.name, one.shape, stored, size))
        for name, value in rule.constants.items():
            tensors.append((prefix + name, (len(value),), value, 4 * len(value)))
    return tensors


def _shards(tensors: list[tuple], limit: int) -> list[list[tuple]]:
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor[3] > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor[3]
    return shards


def _write(output: pathlib.Path, shards: list[list[tuple]], total: int, rng):
    from safetensors.numpy import save_file
    from tqdm import tqdm

    from ddtree_jax.models.tensors import INDEX

    weight_map = {}
    with tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
            arrays = {}
            for name, shape, dtype, size in shard:
                arrays[name] = _random(name, shape, dtype, rng)
                weight_map[name] = file
                bar.update(size)
            # A file that stops half-way never has the name of a finished one.
            save_file(arrays, output / f"{file}.part", metadata={"format": "pt"})
            os.replace(output / f"{file}.part", output / file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _random(name: str, shape: tuple[int, ...], dtype, rng) -> np.ndarray:
    """Numbers that keep the activations of a deep model in range."""
    from ddtree_jax.models.tensors import DTYPES

    if not isinstance(dtype, str):
        return np.asarray(dtype, np.int32)
    if dtype == "I32":  # eight nibbles of any value
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)
    if name.endswith("weight_scale"):  # nibbles have a deviation of 4.6
        numbers = rng.uniform(0.8, 1.2, shape).astype(np.float32) * (_STD / 4.6)
    elif name.endswith("weight_scale_inv"):
        numbers = rng.uniform(0.8, 1.2, shape).astype(np.float32) * (_STD / _FP8_STD)
    elif dtype == "F8_E4M3":
        numbers = np.clip(_FP8_STD * rng.standard_normal(shape, np.float32), -448, 448)
    elif name.endswith("norm.weight"):
        numbers = 1 + 0.1 * rng.standard_normal(shape, np.float32)
    else:
        numbers = _STD * rng.standard_normal(shape, np.float32)
    return numbers.astype(DTYPES[dtype], copy=False)


if __name__ == "__main__":
    program.run(main)
