"""Which tensors of a checkpoint make which parameters: one table, to load and to save.

Names are canonical: `model.X` and `lm_head.X`, without the prefix of a multimodal wrapper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from flax import nnx

from . import fp8, quantization
from .deepseek_v3.config import KimiK26Config

FLOAT = ("BF16", "F32", "F16")  # safetensors' names of the dtypes that a float tensor may have
FP8 = "F8_E4M3"
Path = tuple  # of a parameter in a module: names and indices
Arrays = Sequence  # of NumPy arrays, or of what is read where it is indexed like one


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint: its canonical name, shape and the dtypes it may have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT

    def in_blocks(self, dtype: str) -> bool:
        """Whether a weight that is stored as `dtype` becomes floats by the scales of its blocks."""
        return dtype == FP8 and self.dtypes != (FP8,)

    @property
    def block_scales(self) -> Source:
        """The scales of a weight in fp8, one for each block."""
        shape = tuple(map(fp8.blocks, self.shape))
        return Source(f"{self.name}_scale_inv", shape, ("F32",))


@dataclasses.dataclass(frozen=True)
class Rule:
    """`load` turns the sources' arrays into those of the parameters at `paths`, `save` back."""

    paths: tuple[Path, ...]
    sources: tuple[Source, ...]
    load: Callable[[Arrays], Arrays]
    save: Callable[[Arrays], Arrays]
    #: Small tensors that repeat what is known, by name: checked, not kept.
    constants: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def drafter_rules(drafter: nnx.Module) -> list[Rule]:
    """Rules for a `DFlashDrafter`, abstract or real."""
    return [_plain(path, shape, "") for path, shape in _parameters(drafter).items()]


def target_rules(target: nnx.Module, names: frozenset[str] = frozenset()) -> Iterator[Rule]:
    """Rules for a `KimiK26`, abstract or real, each made when it is asked for.

    Args:
      target: the model.
      names: canonical names that the checkpoint holds; they decide between float experts stored one
        by one and stacked, and whether there are indices of groups to check.
    """
    config = target.config
    # A linear layer of an fp8 folder may be left in floats: which are is in no config.
    linear = (FP8, *FLOAT) if config.experts == "fp8" else FLOAT
    for path, shape in _parameters(target).items():
        last = path[-1]
        if path == ("embed_tokens",):
            yield _same(path, Source("model.embed_tokens.weight", shape))
        elif last == "k_up":
            yield _latent_up(path[:-1], config, linear)
        elif last == "v_up":
            pass  # made with k_up
        elif last == "e_score_correction_bias":
            yield _same(path, Source(_name("model.", path), shape))
        elif last in ("gate_up", "down"):
            stacked = _name("model.", path[:-1]) + f".{last}_proj"
            if stacked in names:
                yield _same(path, Source(stacked, shape))
            else:
                yield _experts(path, shape, "weight", FLOAT)
        elif last in _EXPERT_TENSORS:
            yield _experts(path, shape, *_EXPERT_TENSORS[last], names)
        else:
            dtypes = linear if "_proj" in path[-2] else FLOAT
            yield _plain(path, shape, "" if path[0] == "lm_head" else "model.", dtypes)


#: Suffix and dtypes of the tensors, one an expert and matrix, that a stacked parameter is made of.
_EXPERT_TENSORS = {
    f"{part}_{held}": (suffix, dtypes)
    for part in ("gate_up", "down")
    for held, suffix, dtypes in (
        ("packed", "weight_packed", ("I32",)),
        ("scale", "weight_scale", FLOAT),
        ("fp8", "weight", (FP8,)),
        ("scale_inv", "weight_scale_inv", ("F32",)),
    )
}


def _parameters(model: nnx.Module) -> dict[Path, tuple[int, ...]]:
    return {path: tuple(v.shape) for path, v in nnx.to_flat_state(nnx.state(model))}


def _name(prefix: str, path: Path) -> str:
    return prefix + ".".join(map(str, path))


def _same(path: Path, source: Source) -> Rule:
    return Rule((path,), (source,), load=tuple, save=tuple)


def _plain(
    path: Path, shape: tuple[int, ...], prefix: str, dtypes: tuple[str, ...] = FLOAT
) -> Rule:
    """A norm's weight as it is, or a kernel [inputs, outputs] from torch's [outputs, inputs]."""
    name = _name(prefix, path[:-1]) + ".weight"
    if path[-1] == "weight":
        return _same(path, Source(name, shape))

    def transpose(arrays):
        return [arrays[0].T]

    return Rule((path,), (Source(name, shape[::-1], dtypes),), load=transpose, save=transpose)


def _latent_up(path: Path, config: KimiK26Config, dtypes: tuple[str, ...]) -> Rule:
    """kv_b_proj [H * (qk_nope + v), 512]: for each head its keys' rows, then its values'."""
    heads, split = config.num_attention_heads, config.qk_nope_head_dim
    rows = split + config.v_head_dim

    def load(arrays):
        by_head = arrays[0].reshape(heads, rows, -1)
        return by_head[:, :split], by_head[:, split:].swapaxes(1, 2)

    def save(arrays):
        by_head = np.concatenate([arrays[0], arrays[1].swapaxes(1, 2)], axis=1)
        return [by_head.reshape(heads * rows, -1)]

    shape = (heads * rows, config.kv_lora_rank)
    source = Source(_name("model.", path) + ".weight", shape, dtypes)
    return Rule(((*path, "k_up"), (*path, "v_up")), (source,), load=load, save=save)


def _experts(
    path: Path,
    shape: tuple[int, ...],
    suffix: str,
    dtypes: tuple[str, ...],
    stored: frozenset[str] = frozenset(),
) -> Rule:
    """Stacks the experts' tensors, gate and up one above the other."""
    count, rows, columns = shape
    parts = ("gate_proj", "up_proj") if path[-1].startswith("gate_up") else ("down_proj",)
    each = rows // len(parts)
    prefix = _name("model.", path[:-1])
    names = [f"{prefix}.{expert}.{part}" for expert in range(count) for part in parts]

    def load(arrays):
        return [_Stack(arrays, shape, len(parts))]

    def save(arrays):
        return list(arrays[0].reshape(count * len(parts), each, columns))

    constants = {}
    if suffix == "weight_packed":
        constants = {f"{name}.weight_shape": (each, columns * 8) for name in names}
        # The group of each input, where it is stored: served are groups that lie side by side.
        groups = tuple(i // quantization.GROUP for i in range(columns * quantization.PER_WORD))
        constants |= {k: groups for k in (f"{n}.weight_g_idx" for n in names) if k in stored}
    sources = tuple(Source(f"{name}.{suffix}", (each, columns), dtypes) for name in names)
    return Rule((path,), sources, load=load, save=save, constants=constants)


class _Stack:
    """The experts' matrices as one array [E, rows, columns], of which only what is indexed is read."""

    def __init__(self, arrays: Arrays, shape: tuple[int, ...], parts: int):
        self.shape = shape
        self._arrays, self._parts = arrays, parts

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        experts = range(self.shape[0])[index[0]]
        each = self.shape[1] // self._parts
        out = None
        for place, expert in enumerate(experts):
            for part in range(self._parts):
                matrix = self._arrays[expert * self._parts + part]
                if out is None:
                    out = np.empty((len(experts), *self.shape[1:]), matrix.dtype)
                out[place, part * each : (part + 1) * each] = matrix
        return out[:, *index[1:]]
