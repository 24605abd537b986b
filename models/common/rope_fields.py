"""The rotary embedding that a config.json asks for.

transformers' `modeling_rope_utils` sets the meaning of each key, and which of two spellings counts:
`rope_scaling`, unless it is empty, then `rope_parameters`. What it would read in another way than this
file is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..rope import RopeConfig
from .fields import Fields, naming, shown

_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(fields: Fields) -> RopeConfig:
    """Reads `rope_scaling`, `rope_parameters`, `rope_theta` and what lies beside them.

    Raises:
      ValueError: a value out of range, or a key or kind that is not served; the message names it.
    """
    # Both are looked at, so that neither is called unknown.
    found = {key: fields.section(key) for key in ("rope_scaling", "rope_parameters")}
    name = next((key for key, inner in found.items() if inner is not None and inner.values), None)
    inner = Fields({}, fields.where) if name is None else found[name]
    if name == "rope_scaling" and fields.get("rope_theta") is None:
        _refuse_theta_elsewhere(fields, inner, found["rope_parameters"])
    keyed = inner.values and all(isinstance(value, Mapping) for value in inner.values.values())
    if not keyed and inner.values.keys().isdisjoint(_LAYER_TYPES):
        return _read(inner, fields)
    read = {}
    for kind in inner.values:
        if kind not in _LAYER_TYPES:
            raise inner.error(kind, f"is no layer type; known are {' and '.join(_LAYER_TYPES)}")
        one = inner.section(kind)
        if one is None:
            raise inner.error(kind, "is null: layers without rotary embedding are not supported")
        read[kind] = _read(one, fields)
    if len(set(read.values())) > 1:
        raise fields.error(
            name, "differs by layer type; only one rotary embedding for all layers is supported"
        )
    return next(iter(read.values()))


def _refuse_theta_elsewhere(fields: Fields, scaling: Fields, parameters: Fields | None):
    """transformers would take 10000 where theta stands in `rope_parameters` alone."""
    if scaling.get("rope_theta") is None and parameters is not None:
        theta = parameters.get("rope_theta")
        if theta is not None:
            raise fields.error(
                "rope_scaling",
                f"counts, but rope_theta {shown(theta)} stands in rope_parameters; "
                "write it beside rope_scaling",
            )


def _read(inner: Fields, outer: Fields) -> RopeConfig:
    # Where both say it, the inner one counts.
    theta = inner.number("rope_theta", outer.number("rope_theta", None))
    theta = outer.number("rope_theta") if theta is None else theta
    kind = inner.text("type", "default")
    kind = inner.text("rope_type", kind)
    for fields in (inner, outer):
        if fields.number("partial_rotary_factor", 1.0) != 1:
            raise fields.error("partial_rotary_factor", "must be 1: all of the head is rotated")
    if kind == "default":
        config = {"theta": theta}
        outer.harmless("original_max_position_embeddings")  # nothing is scaled by it
        amplitude = outer.number("rope_attention_factor", 1.0)
        if amplitude != 1:
            raise outer.error("rope_attention_factor", "is for yarn; the rope type is 'default'")
    elif kind in ("yarn", "deepseek_yarn"):
        config = {"theta": theta, **_yarn(inner, outer)}
    else:
        raise ValueError(
            f"{inner.where}: rope type {shown(kind)}, but only 'default' or 'yarn' is supported"
        )
    inner.finish()
    with naming(inner.where):
        return RopeConfig(**config)


def _yarn(inner: Fields, outer: Fields) -> dict[str, float | int | bool | None]:
    longest = outer.whole("max_position_embeddings")
    # The one beside counts first, then the one inside.
    original = inner.whole("original_max_position_embeddings", None)
    original = outer.whole("original_max_position_embeddings", original)
    original = longest if original is None else original
    inner.need("factor")  # null is an answer: the ratio of the two lengths
    factor = inner.number("factor", None)
    if factor is None:
        if not 0 < original <= longest <= 2**30:
            raise inner.error("factor", "is null, and the context lengths give no factor")
        factor = longest / original
    amplitude = inner.number("attention_factor", None)
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": inner.number("beta_fast", 32.0),
        "beta_slow": inner.number("beta_slow", 1.0),
        "mscale": inner.number("mscale", None),
        "mscale_all_dim": inner.number("mscale_all_dim", None),
        "attention_factor": outer.number("rope_attention_factor", amplitude),
        # Not by a default: transformers takes null for false.
        "truncate": inner.flag("truncate") if "truncate" in inner.values else True,
    }
