"""What a checkpoint takes on its devices, from config.json and the index alone."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection

import jax.numpy as jnp
from flax import nnx

from .checkpoint import check_pair, param_dtype_argument
from .common.fields import read_json
from .counts import check_target
from .deepseek_v3.config import LATENT_DIM, ROPE_DIM, KimiK26Config
from .dflash.config import DFlashConfig
from .dflash.model import DFlashDrafter
from .kimi_k26 import KimiK26, latent_cache_dtype
from .layers import float_dtype
from .layout import FP8, Path, target_rules
from .names import canonical, layer_of
from .sharding import logical_axes
from .tensors import stored_names

#: Bytes a device keeps for activations, prefill and the runtime itself.
RESERVE = 4 * 10**9


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of a target and its drafter.

    Attributes:
      experts: routed experts, as they are held: packed int4 or fp8 with their scales, or floats.
      rest: everything else of the target.
      whole: of `rest`, what a mesh keeps whole on every device.
      drafter: the drafter's parameters; 0 without one.
      row: caches of one position of one request, target and drafter together.
      max_context: positions that the target was made for.
      vocab_size: tokens that a node's logits are for.
    """

    experts: int
    rest: int
    whole: int
    drafter: int
    row: int
    max_context: int
    vocab_size: int

    @property
    def weights(self) -> int:
        return self.experts + self.rest + self.drafter

    def per_device(self, devices: int, *, mesh: bool = False) -> int:
        """Bytes of weights a device, split evenly over `devices`, or as a mesh of them splits."""
        whole = self.whole + self.drafter if mesh else 0
        return whole + math.ceil((self.weights - whole) / devices)

    def context(
        self,
        devices: int,
        device_bytes: int,
        *,
        batch: int = 1,
        nodes: int = 17,
        mesh: bool = False,
    ) -> int:
        """Positions that `batch` requests can have each; 0 when there is no room for one.

        Weights are split as `per_device` says; each device holds all rows of the caches, since all
        heads of latent attention read the same rows, the `nodes` of a round behind each request's
        last position, and their float32 logits.
        """
        logits = batch * nodes * self.vocab_size * 4
        left = device_bytes - RESERVE - self.per_device(devices, mesh=mesh) - logits
        return max(0, min(self.max_context, left // (self.row * batch) - (nodes - 1)))


def footprint(
    target_path: str | os.PathLike,
    drafter_path: str | os.PathLike | None = None,
    *,
    dtype="bfloat16",
    param_dtype=None,
    cache_dtype=None,
    ignore_config: Collection[str] = (),
) -> Footprint:
    """Computes it without reading a weight.

    Args:
      target_path: a folder with config.json and, if sharded, its index.
      drafter_path: the drafter's folder.
      dtype: of the arithmetic, "float32" or "bfloat16".
      param_dtype: of everything but packed experts, as `load_target` takes it; `dtype` by default. What is stored in
        bfloat16 is known from config.json, which speaks of all weights at once.
      cache_dtype: of the target's cache, `dtype` by default or "float8_e4m3fn".
      ignore_config: keys of both config.json to take as absent, as `load_target` takes it.

    Raises:
      FileNotFoundError: no config.json.
      ValueError: a config.json or a dtype that `load_target` or `load_drafter` would refuse, or weights
        of another number of layers or routed experts.
    """
    config = KimiK26Config.from_json(target_path, ignore=ignore_config)
    _check_counts(target_path, config)
    dtype = float_dtype("dtype", dtype)
    param_dtype = param_dtype_argument(param_dtype)
    experts = rest = whole = 0
    kinds = {"dtype": dtype, "param_dtype": _held(target_path, dtype, param_dtype)}
    target = nnx.eval_shape(lambda: KimiK26(config, **kinds))
    widened = _from_fp8(target) if param_dtype == "stored" else ()
    for path, parameter in nnx.to_flat_state(nnx.state(target)):
        itemsize = (dtype if path in widened else jnp.dtype(parameter.dtype)).itemsize
        nbytes = math.prod(parameter.shape) * itemsize
        if _is_expert(path):
            experts += nbytes
        else:
            rest += nbytes
            whole += 0 if any(logical_axes(path, parameter.shape)) else nbytes
    latent = latent_cache_dtype(cache_dtype, dtype).itemsize
    row = config.num_hidden_layers * (LATENT_DIM + ROPE_DIM) * latent
    drafter = 0
    if drafter_path is not None:
        draft = DFlashConfig.from_json(drafter_path, ignore=ignore_config)
        check_pair(
            drafter_path, draft, config.hidden_size, config.vocab_size, config.num_hidden_layers
        )
        abstract = nnx.eval_shape(lambda: DFlashDrafter(draft, dtype=dtype))
        numbers = sum(math.prod(p.shape) for _, p in nnx.to_flat_state(nnx.state(abstract)))
        drafter = numbers * _held(drafter_path, dtype, param_dtype).itemsize
        row += (
            draft.num_hidden_layers
            * 2
            * draft.num_key_value_heads
            * draft.head_dim
            * dtype.itemsize
        )
    return Footprint(
        experts, rest, whole, drafter, row, config.max_position_embeddings, config.vocab_size
    )


def _held(path: str | os.PathLike, dtype, param_dtype):
    """The dtype of a folder's parameters."""
    if param_dtype != "stored":
        return dtype if param_dtype is None else param_dtype
    values, _ = read_json(path)
    sections = [values, values.get("text_config") or {}]
    said = [section.get(name) for section in sections for name in ("dtype", "torch_dtype")]
    return jnp.dtype(jnp.bfloat16) if "bfloat16" in said else dtype


def _from_fp8(target: KimiK26) -> set[Path]:
    """Parameters that a folder in fp8 stores so, and that are floats here."""
    rules = (rule for rule in target_rules(target) if rule.sources[0].dtypes != (FP8,))
    return {path for rule in rules if FP8 in rule.sources[0].dtypes for path in rule.paths}


def _is_expert(path: Path) -> bool:
    return "experts" in path


def _check_counts(folder: str | os.PathLike, config: KimiK26Config):
    """Holds layers and experts against the names of the weights, where those are there."""
    stored = stored_names(folder)
    if stored is None:
        return
    where, names = stored
    last = config.num_hidden_layers
    # Layers for multi-token prediction come after the others, if at all.
    extra = range(last, last + config.num_nextn_predict_layers)
    known = (name for name in map(canonical, names) if name is not None)
    check_target(where, [name for name in known if layer_of(name) not in extra], config)
