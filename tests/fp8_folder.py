"""A random checkpoint in fp8 blocks, as its tensors."""

import json
import pathlib

import jax
import numpy as np
from safetensors.numpy import save_file

from ddtree_jax.models import KimiK26, KimiK26Config
from ddtree_jax.models.layout import target_rules
from ddtree_jax.models.tensors import DTYPES


def random_tensors(rng, config: dict) -> dict[str, np.ndarray]:
    """Canonical name to array, for a flat config.json."""
    parsed = KimiK26Config.from_json(config)
    made = {}
    for rule in target_rules(jax.eval_shape(lambda: KimiK26(parsed))):
        for source in rule.sources:
            scales = [source.block_scales] if source.in_blocks(source.dtypes[0]) else []
            for one in (source, *scales):
                made[one.name] = _random(rng, one).astype(DTYPES[one.dtypes[0]])
    return made


def _random(rng, source) -> np.ndarray:
    if source.dtypes[0] == "F8_E4M3":
        return np.clip(rng.normal(0, 100, source.shape), -448, 448)
    if source.name.endswith("scale_inv"):
        return rng.uniform(5e-4, 15e-4, source.shape)
    return (
        rng.normal(1, 0.2, source.shape)
        if len(source.shape) == 1
        else rng.normal(0, 0.1, source.shape)
    )


def write(folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray]):
    """Writes config.json and model.safetensors into `folder`, made if needed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
