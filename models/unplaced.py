"""Why a checkpoint's tensor has no place, or why one is missing, where its name tells."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

_CACHE_SCALE = re.compile(r".*\.([kv]|q|kv)_(scale|zero_point)$")
_KINDS = (
    (
        _CACHE_SCALE,
        "scales of a quantized KV cache, whose dtype is chosen here by cache_dtype and not by the "
        "checkpoint; to leave them out, pass --ignore_config quantization_config.kv_cache_scheme",
    ),
    (
        re.compile(r".*\.(weight_zero_point|qzeros)$"),
        "zero points, but only symmetric weights (without any) are supported",
    ),
    (
        re.compile(r".*\.(weight_g_idx|g_idx)$"),
        "orders of activations (actorder), which are supported for routed experts alone, and only "
        "where they leave the inputs in their place",
    ),
    (
        re.compile(r".*\.(input_scale|input_global_scale|output_scale|activation_scale)$"),
        "scales of quantized activations, which are not supported",
    ),
    (
        re.compile(r".*\.(weight_packed|weight_scale|weight_shape|weight_global_scale)$"),
        "parts of packed weights, but quantization_config does not speak of them; only routed "
        "experts are supported packed, as compressed-tensors' pack-quantized int4",
    ),
    (
        re.compile(r".*\.weight_scale_inv$"),
        "scales of weights in fp8, but those weights are not in fp8 or quantization_config does not "
        "say so",
    ),
    (re.compile(r".*\.bias$"), "biases, which the models of this family do not have"),
)


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of a quantized KV cache."""
    return _CACHE_SCALE.match(name) is not None


def why_left(names: Collection[str]) -> tuple[list[str], str]:
    """Those of the tensors without a place whose kind is known, and what they are.

    Returns:
      All of `names` and an empty text where no kind is known.
    """
    for pattern, what in _KINDS:
        found = sorted(filter(pattern.match, names))
        if found:
            return found, f": {what}"
    return sorted(names), ""


def why_missing(name: str, names: Collection[str], dtype: Callable[[str], str]) -> str:
    """What lies in the place of a missing tensor; empty where nothing does.

    Args:
      name: the tensor that was looked for.
      names: of all that are there.
      dtype: safetensors' dtype of one of them.
    """
    module, _, suffix = name.rpartition(".")
    experts = ".mlp.experts." in name
    if suffix in ("weight_packed", "weight_scale"):
        weight = f"{module}.weight"
        stacked = re.sub(r"\.\d+\.\w+$", ".down_proj", module)
        held = next((one for one in (weight, stacked) if one in names), None)
        if held is not None:
            return (
                f"; instead there is {held!r} in {dtype(held)}: the experts are not packed, though "
                "quantization_config says so: if it was left over, pass "
                "--ignore_config quantization_config"
            )
    if suffix in ("weight", "gate_up_proj", "down_proj") and f"{module}.weight_packed" in names:
        there = f"; instead there is '{module}.weight_packed': "
        if experts:
            return (
                there + "packed experts, of which config.json's quantization_config does not speak"
            )
        return there + "only routed experts are supported packed, all else in floats"
    return ""
