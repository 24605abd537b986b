"""Loads a target or a drafter from a folder of safetensors in the published layouts.

No pickle is read and no code of a checkpoint is run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from . import fp8
from .common.fields import ignored_keys, naming, shown
from .counts import check_layers, check_target, first_sources
from .deepseek_v3.config import KimiK26Config
from .dflash.config import DFlashConfig
from .dflash.model import DFlashDrafter
from .dflash.other_kinds import refuse_by_tensors
from .huge_pages import use_huge_pages
from .kimi_k26 import KimiK26
from .layers import float_dtype
from .layout import Path, Rule, Source, drafter_rules, target_rules
from .moe import PackedParam
from .names import canonical, layer_of
from .placement import Placement
from .sharding import ShardingRules
from .tensors import Tensors
from .unplaced import is_cache_scale

_SCALES = ("weight_scale", "weight_scale_inv")
_WORTH_A_BAR = 10**9  # bytes
_DTYPES = {"BF16": jnp.bfloat16, "F32": jnp.float32}


def load_target(
    path: str | os.PathLike,
    *,
    mesh=None,
    dtype=None,
    param_dtype=None,
    rules: ShardingRules | None = None,
    cache_dtype=None,
    cache_scale: tuple[float, ...] | None = None,
    ignore_config: Collection[str] = (),
) -> KimiK26:
    """Loads a folder of Kimi K2, K2-Thinking, K2.5 or K2.6, or a DeepSeek-V3 one as transformers writes it.

    Routed experts in packed int4 or in fp8 stay so; other layers in fp8 become floats. Vision tensors
    and multi-token prediction layers are skipped.

    Args:
      path: the folder.
      mesh: a `jax.sharding.Mesh` of `Auto` axes; each parameter goes to its sharding at once, and a
        process reads what its own devices hold. The target keeps it in `placement`: each device runs
        the kernels on its own experts and heads, and every device holds the caches. None is one device.
      dtype: "float32" or "bfloat16" for the arithmetic; the checkpoint's own by default.
      param_dtype: of all parameters but packed experts and the router's bias: "float32" or "bfloat16", to which
        other numbers are rounded, or "stored": what is stored in bfloat16 stays so, all else becomes `dtype`, so
        that no weight has another value than in `dtype`, and none takes more memory than it must. `dtype` by
        default.
      rules: which axes of the parameters lie on which axis of the mesh.
      cache_dtype: of the latent cache, "float8_e4m3fn" for half of bfloat16's bytes, and another text by its
        rounding; `dtype` by default.
      cache_scale: for such a cache, what its numbers are multiplied with, one for each layer
        (`KimiK26`); 1 by default.
      ignore_config: keys of config.json to take as absent (`KimiK26Config.from_json`).

    Raises:
      FileNotFoundError: the folder, its config.json, its weights or a shard is missing.
      ValueError: anything in them that does not fit; the message names file, tensor and remedy.
    """
    wanted, held = _dtype_arguments(dtype, param_dtype)
    config = KimiK26Config.from_json(_folder(path), ignore=ignore_config)

    no_cache_scales = "quantization_config.kv_cache_scheme" in ignored_keys(ignore_config)

    def name_of(stored: str) -> str | None:
        name = canonical(stored)
        if name is None or no_cache_scales and is_cache_scale(name):
            return None
        layer = layer_of(name)
        # Layers past the last are for multi-token prediction, as many as the config says.
        extra = -1 if layer is None else layer - config.num_hidden_layers
        return None if 0 <= extra < config.num_nextn_predict_layers else name

    tensors = Tensors(path, name_of)
    check_target(tensors.folder, tensors.names, config)
    tensors.check(first_sources(config))
    if config.tie_word_embeddings and "lm_head.weight" in tensors.names:
        _check_tied(tensors, config)
    dtype = wanted or _stored_dtype(tensors, "model.embed_tokens.weight")
    placement = None if mesh is None else Placement(mesh, rules or ShardingRules())
    cache = {"cache_dtype": cache_dtype, "cache_scale": cache_scale}
    kinds, wide = _kinds(dtype, held)
    target = nnx.eval_shape(lambda: KimiK26(config, placement=placement, **kinds, **cache))
    shardings = {} if placement is None else placement.rules.shardings(target, mesh)
    _fill(target, target_rules(target, tensors.names), tensors, shardings, wide)
    return target


def load_drafter(
    path: str | os.PathLike,
    target: KimiK26,
    *,
    dtype=None,
    param_dtype=None,
    window: int | None = None,
    ignore_config: Collection[str] = (),
) -> DFlashDrafter:
    """Loads a DFlash drafter's folder for `target`.

    Args:
      path: the folder.
      target: the loaded target; width, vocabulary and depth must be those that the drafter was made
        for. Each device of its mesh gets the whole drafter.
      dtype: "float32" or "bfloat16" for the arithmetic; the checkpoint's own by default.
      param_dtype: of the parameters, as `load_target` takes it.
      window: positions that every layer sees before and behind it, in place of what the config says;
        None leaves that.
      ignore_config: keys of config.json to take as absent (`DFlashConfig.from_json`).

    Raises:
      FileNotFoundError: the folder, its config.json, its weights or a shard is missing.
      ValueError: anything in them that does not fit, or fits another target, or another kind of drafter.
    """
    wanted, held = _dtype_arguments(dtype, param_dtype)
    config = DFlashConfig.from_json(_folder(path), ignore=ignore_config)
    if window is not None:
        with naming("window"):
            config = config.with_window(window)
    check_pair(path, config, target.hidden_size, target.vocab_size, target.num_layers)
    tensors = Tensors(path, lambda name: name.removeprefix("model."))
    refuse_by_tensors(tensors.folder, tensors.names)
    layers = (layer_of(f"model.{name}") for name in tensors.names)
    found = [layer for layer in layers if layer is not None]
    check_layers(tensors.folder, found, config.num_hidden_layers)
    size = config.hidden_size
    tensors.check([Source("fc.weight", (size, len(config.taps) * size))])
    dtype = wanted or _stored_dtype(tensors, "fc.weight")
    kinds, wide = _kinds(dtype, held)
    drafter = nnx.eval_shape(lambda: DFlashDrafter(config, **kinds))
    shardings = {}
    placement = getattr(target, "placement", None)  # What is asked of a target are its sizes.
    if placement is not None:
        paths = (path for path, _ in nnx.to_flat_state(nnx.state(drafter)))
        shardings = dict.fromkeys(paths, placement.whole)
    _fill(drafter, drafter_rules(drafter), tensors, shardings, wide)
    return drafter


def _check_tied(tensors: Tensors, config: KimiK26Config):
    """Takes a stored head that should be the embedding; one that is not would be lost silently."""
    shape = (config.vocab_size, config.hidden_size)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    tensors.check(Source(name, shape) for name in names)
    head, embedding = (tensors.take(name).astype(np.float32) for name in names)
    if not np.array_equal(head, embedding, equal_nan=True):
        raise ValueError(
            f"{tensors.folder}: tie_word_embeddings is true, but the tensor 'lm_head.weight' is not "
            "the embedding; set it to false in config.json, or remove the tensor"
        )


def check_pair(
    path: str | os.PathLike, config: DFlashConfig, hidden_size: int, vocab_size: int, layers: int
):
    """Raises a ValueError unless the drafter of folder `path` was made for a target of these sizes."""
    for name, mine, its in (
        ("hidden_size", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
        ("num_target_layers", config.num_target_layers, layers),
    ):
        if mine != its:
            raise ValueError(
                f"{os.fspath(path)}: the drafter was made for a target of {name} {mine}, "
                f"this one has {its}; load the drafter that belongs to the target"
            )


def _fill(
    model: nnx.Module, made: Iterable[Rule], tensors: Tensors, shardings: dict[Path, Any], wide
):
    """Puts the checkpoint's values into an abstract model.

    Args:
      model, made, tensors, shardings: what to fill, by which rules, from what, and where to lay it.
      wide: dtype of the parameters that the model has in bfloat16 and the checkpoint has not; None for the model's.
    """
    total, rules = 0, []
    # Each rule is checked as it is made: a missing tensor ends it before the next layer's experts are named.
    for rule in made:
        tensors.check(rule.sources)
        scales = [s.block_scales for s in rule.sources if s.in_blocks(tensors.dtype(s.name))]
        tensors.check(scales)
        total += sum(tensors.nbytes(source.name) for source in (*rule.sources, *scales))
        for name, expected in rule.constants.items():
            if name in tensors.names:
                tensors.check([Source(name, (len(expected),), ("I32", "I64"))])
        rules.append(rule)
    tensors.refuse_leftovers()
    slots = dict(nnx.to_flat_state(nnx.state(model)))
    # None: tqdm keeps quiet where nobody watches.
    quiet = None if total >= _WORTH_A_BAR else True
    rounded = False
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=quiet) as bar:
        for rule in rules:
            for name, expected in rule.constants.items():
                if name in tensors.names and tuple(tensors.take(name).tolist()) != expected:
                    order = ": inputs out of order" if name.endswith("weight_g_idx") else ""
                    raise ValueError(
                        f"{tensors.folder}: the tensor {name!r} should say {shown(expected)}{order}"
                    )
            slot = slots[rule.paths[0]]  # for all of them
            dtype, packed = slot.dtype, isinstance(slot, PackedParam)
            if wide is not None and not packed and dtype == jnp.bfloat16:
                dtype = dtype if _is_bfloat16(rule, tensors) else wide
            # Read one by one into the stack: beside it there are one expert's tensor and the
            # stack's copy on the device.
            values = _OnDemand(tensors, rule.sources, dtype, bar)
            arrays = rule.load(values)
            for path, array in zip(rule.paths, arrays, strict=True):
                placed = _put(array, dtype, shardings.get(path))
                # A transfer holds what it reads from: the next is not read beside it.
                slots[path].set_value(jax.block_until_ready(placed))
            rounded = rounded or (packed and values.rounded)
            del arrays, array
    if rounded:
        warnings.warn(
            f"{tensors.folder}: scales of packed experts are rounded to bfloat16, which the kernel "
            "reads, by up to 1 part in 512 each",
            stacklevel=3,
        )
    use_huge_pages(slot[...] for slot in slots.values())


def _is_bfloat16(rule: Rule, tensors: Tensors) -> bool:
    return all(tensors.dtype(source.name) == "BF16" for source in rule.sources)


def _put(array, dtype, sharding) -> jax.Array:
    """`array` on the device, or each device's part of it there; what no device here holds is not read."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # A view of the file is copied: a CPU's array may lie where its source lies, and outlive the file.
        return array[index].astype(dtype, order="C", copy=isinstance(array, np.ndarray))

    if sharding is None:
        # Not jnp.asarray, which holds up to two more copies meanwhile; a CPU takes the array as it lies.
        return jax.device_put(read((slice(None),) * len(array.shape)))
    parts = {}  # Devices that hold the same share one reading.

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((one.start, one.stop) for one in index)
        if key not in parts:
            parts[key] = read(index)
        return parts[key]

    return jax.make_array_from_callback(array.shape, sharding, part)


class _OnDemand(Sequence):
    """Values of tensors, each read when it is asked for; those in fp8 blocks as floats of `dtype`.

    Attributes:
      rounded: whether a scale of packed weights that was read is another number in `dtype`.
    """

    def __init__(self, tensors: Tensors, sources: tuple[Source, ...], dtype, bar: tqdm):
        self._tensors, self._sources, self._dtype, self._bar = tensors, sources, dtype, bar
        self.rounded = False

    def __len__(self):
        return len(self._sources)

    def __getitem__(self, index: int) -> np.ndarray:
        source = self._sources[index]
        value = self._take(source.name)
        if source.in_blocks(self._tensors.dtype(source.name)):
            scales = self._take(source.block_scales.name)
            return fp8.dequantize(value, scales, self._dtype)
        if source.name.endswith(".weight_scale"):
            scales = value.astype(self._dtype)
            self.rounded = self.rounded or not np.array_equal(scales, value)
            return self._finite(source.name, scales)
        return value

    def _take(self, name: str) -> np.ndarray:
        value = self._tensors.take(name)
        if name.endswith(_SCALES):
            self._finite(name, value)
        self._bar.update(value.nbytes)
        return value

    def _finite(self, name: str, value: np.ndarray) -> np.ndarray:
        # One bad scale spoils every token that meets its weights, and no later check would name it.
        if not np.isfinite(value.astype(np.float32)).all():
            raise ValueError(
                f"{self._tensors.folder}: the tensor {name!r} holds NaN or inf; "
                "download the checkpoint again"
            )
        return value


def _folder(path: str | os.PathLike) -> str:
    path = os.fspath(path)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: no such folder; give the folder that holds config.json")
    return path


def _dtype_arguments(dtype, param_dtype):
    """Both checked, before anything is read."""
    if dtype is not None:
        dtype = float_dtype("dtype", dtype)
    return dtype, param_dtype_argument(param_dtype)


def param_dtype_argument(value):
    """`param_dtype` of `load_target`, checked: a dtype, "stored" or None."""
    return None if value is None else float_dtype("param_dtype", value, also=("stored",))


def _kinds(dtype, param_dtype):
    """The dtypes that a model is made with, and `_fill`'s `wide`."""
    if param_dtype == "stored":
        return {"dtype": dtype, "param_dtype": jnp.bfloat16}, dtype
    return {"dtype": dtype, "param_dtype": param_dtype}, None


def _stored_dtype(tensors: Tensors, name: str):
    """The dtype of a tensor that all checkpoints have; a missing one is reported later."""
    stored = tensors.dtype(name) if name in tensors.names else "BF16"
    if stored not in _DTYPES:
        raise ValueError(
            f"{tensors.folder}: the weights are {stored}; pass dtype='float32' or dtype='bfloat16'"
        )
    return _DTYPES[stored]
