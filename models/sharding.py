"""Which axis of which parameter is split over which axis of a device mesh."""

from __future__ import annotations

import dataclasses

from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .deepseek_v3.config import KimiK26Config
from .layout import Path

#: Logical axes of the parameters that are split, by the end of their path; the others are whole everywhere.
#: All that has to do with one head, one expert or one unit of an MLP lies on one device, so that a block
#: ends in one sum over devices.
_AXES = {
    ("embed_tokens",): ("vocab", None),
    ("lm_head", "kernel"): (None, "vocab"),
    ("q_proj", "kernel"): (None, "heads"),
    ("q_b_proj", "kernel"): (None, "heads"),
    ("k_up",): ("heads", None, None),
    ("v_up",): ("heads", None, None),
    ("o_proj", "kernel"): ("heads", None),
    ("gate_proj", "kernel"): (None, "inner"),
    ("up_proj", "kernel"): (None, "inner"),
    ("down_proj", "kernel"): ("inner", None),
}


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of each logical axis; None keeps that axis whole on every device.

    | logical axis | of which parameters | why |
    | --- | --- | --- |
    | vocab | embedding and head | the largest matrices outside of the experts |
    | heads | queries, k_up, v_up, o_proj | all heads read the same latents, which are whole everywhere |
    | inner | dense and shared MLPs | |
    | experts | routed experts | an expert is whole on its device: packed int4 is never cut |

    Norms, the router and the projections to latents are whole on every device.
    """

    vocab: str | None = "model"
    heads: str | None = "model"
    inner: str | None = "model"
    experts: str | None = "model"

    def shardings(self, target: nnx.Module, mesh: Mesh | AbstractMesh) -> dict[Path, NamedSharding]:
        """The sharding of every parameter of a target, by its path.

        Raises:
          ValueError: the mesh has an axis that is not `Auto`, lacks one that the rules name, or a
            parameter's axis is not a multiple of it.
        """
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise ValueError(f"mesh must be a jax.sharding.Mesh, not a {type(mesh).__name__}")
        if any(kind != AxisType.Auto for kind in mesh.axis_types):
            raise ValueError(
                "the mesh's axes must be Auto: jax.make_mesh(..., axis_types=(AxisType.Auto,))"
            )
        shardings = {}
        for path, parameter in nnx.to_flat_state(nnx.state(target)):
            spec = tuple(
                name and getattr(self, name) for name in logical_axes(path, parameter.shape)
            )
            for size, axis in zip(parameter.shape, spec, strict=True):
                if axis is not None and axis not in mesh.shape:
                    raise ValueError(f"the mesh has the axes {tuple(mesh.shape)}, but no {axis!r}")
                if axis is not None and size % mesh.shape[axis]:
                    raise ValueError(
                        f"{'.'.join(map(str, path))} {tuple(parameter.shape)} does not split: {size} is "
                        f"not a multiple of the mesh's {axis!r}, {mesh.shape[axis]}"
                    )
            shardings[path] = NamedSharding(mesh, PartitionSpec(*spec))
        return shardings


def split_sizes(config: KimiK26Config) -> dict[str, int]:
    """What `ShardingRules` splits, by what users call it: every size must be a multiple of the mesh's axis."""
    sizes = {"tokens of vocabulary": config.vocab_size, "heads": config.num_attention_heads}
    layers = range(config.num_hidden_layers)
    if not all(map(config.is_moe, layers)):
        sizes["inner numbers of the dense MLP"] = config.intermediate_size
    if any(map(config.is_moe, layers)):
        sizes["routed experts"] = config.n_routed_experts
        if config.n_shared_experts:
            inner = config.n_shared_experts * config.moe_intermediate_size
            sizes["inner numbers of the shared experts"] = inner
    return sizes


def logical_axes(path: Path, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The logical axis of each axis of a parameter; None where it is never split."""
    if "experts" in path:
        return ("experts",) + (None,) * (len(shape) - 1)
    for end, axes in _AXES.items():
        if path[-len(end) :] == end:
            return axes
    return (None,) * len(shape)
