"""How a config.json says that weights are stored: compressed-tensors' int4, or fp8 in blocks.

compressed-tensors (K2-Thinking, K2.5, K2.6) says it of modules: `targets` names kinds or names of modules,
`ignore` takes some out again. Served is what those checkpoints do: the routed experts packed, all else
in floats. K2-Instruct and DeepSeek-V3 use "fp8", where each tensor's own dtype tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import regex

from .. import fp8, quantization
from ..common.fields import Fields, shown

_PREFIXES = ("", "language_model.", "model.language_model.")
_SECONDS = 10  # for all patterns of a list on all names: one can be made to take forever
_MOST_PATTERNS = 256
_MOST_CHARACTERS = 1000


def read_quantization(fields: Fields, config) -> str:
    """ "fp8", "int4", or "float" where `ignore` takes out every module.

    Args:
      fields: the object `quantization_config`.
      config: the `KimiK26Config` of the same file.

    Raises:
      ValueError: something that is not served; the message names the key.
    """
    method = fields.text("quant_method", "compressed-tensors")
    fields.only("quant_method", "compressed-tensors", "fp8")
    return _fp8(fields) if method == "fp8" else _compressed_tensors(fields, config)


def _fp8(fields: Fields) -> str:
    fields.only("fmt", "e4m3")
    fields.must("weight_block_size", [fp8.BLOCK] * 2)
    # Activations stay floats here, which is no worse than rounding them on the way.
    fields.only("activation_scheme", "dynamic")
    # Which layers are in fp8 is known from their tensors; how scales were rounded is in the scales.
    fields.harmless("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
    fields.harmless("is_checkpoint_fp8_serialized")
    fields.finish()
    return "fp8"


def _compressed_tensors(fields: Fields, config) -> str:
    fields.must("format", "pack-quantized")
    fields.only("quantization_status", "compressed")
    if fields.get("kv_cache_scheme") is not None:
        raise fields.error(
            "kv_cache_scheme",
            "quantizes the cache, whose dtype is chosen here by cache_dtype: pass --ignore_config "
            f"{fields.name('kv_cache_scheme')} to leave its scales out",
        )
    fields.only("sparsity_config", {})
    fields.only("transform_config", {})
    fields.harmless("version", "global_compression_ratio")
    ignore = _Modules(fields, "ignore", fields.list("ignore", []))
    groups = fields.section("config_groups")
    if groups is None or not groups.values:
        raise fields.error("config_groups", "must have a group of weights")
    targets = [_targets(groups, name) for name in groups.values]
    fields.finish()

    def quantized(module: str) -> bool:
        return not ignore.match(module) and any(t.match(module) for t in targets)

    for module in _modules(config):
        if quantized(module):
            raise fields.error(
                "ignore",
                f"leaves {module} quantized, but only routed experts are supported in int4",
            )
    experts = {module: quantized(module) for module in _experts(config)}
    if len(set(experts.values())) > 1 or ignore.names_an_expert():
        raise fields.error(
            "ignore",
            "takes out some routed experts and leaves others; only all or none is supported",
        )
    return "int4" if any(experts.values()) else "float"


def _targets(groups: Fields, name: str) -> _Modules:
    """Checks one group and gives the modules that it is for."""
    group = groups.section(name)
    if group is None:
        raise groups.error(name, "must be an object, not null")
    group.only("format", "pack-quantized")
    group.only("input_activations")
    group.only("output_activations")
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "is missing; supported are weights in int4")
    weights.must("num_bits", 4)
    weights.must("group_size", quantization.GROUP)
    weights.only("type", "int")
    weights.only("symmetric", True)
    weights.only("strategy", "group")
    weights.only("dynamic", False)
    # "static" orders the columns before it packs, and leaves them in their place.
    weights.only("actorder", "static", "weight", False)
    weights.only("block_structure")
    # How scales were found; their dtype, and that of zero points, which symmetric weights have not.
    weights.harmless("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.finish()
    targets = _Modules(group, "targets", group.list("targets"))
    group.finish()
    return targets


class _Modules:
    """What `targets` or `ignore` names: modules, kinds of modules, and patterns ("re:")."""

    def __init__(self, fields: Fields, key: str, entries: list):
        for entry in entries:
            if not isinstance(entry, str) or len(entry) > _MOST_CHARACTERS:
                raise fields.error(key, f"must be a list of module names, not of {shown(entry)}")
        self._error = lambda wrong: fields.error(key, wrong)
        self._names = {entry for entry in entries if not entry.startswith("re:")}
        patterns = {entry.removeprefix("re:") for entry in entries if entry.startswith("re:")}
        if len(patterns) > _MOST_PATTERNS:
            raise self._error(f"must have at most {_MOST_PATTERNS} patterns, not {len(patterns)}")
        try:
            self._patterns = [regex.compile(pattern) for pattern in patterns]
        except (regex.error, RecursionError, OverflowError) as error:
            raise self._error(f"holds a pattern that cannot be read ({error})") from error
        self._deadline = time.monotonic() + _SECONDS

    def match(self, module: str) -> bool:
        """Whether a module by its name without a wrapper's prefix, a linear layer, is meant."""
        names = [prefix + module for prefix in _PREFIXES]
        if "Linear" in self._names or not self._names.isdisjoint(names):
            return True
        left = max(self._deadline - time.monotonic(), 1e-3)
        try:
            return any(p.match(name, timeout=left) for p in self._patterns for name in names)
        except TimeoutError as error:
            raise self._error("holds a pattern that takes too long") from error

    def names_an_expert(self) -> bool:
        """Whether a routed expert is named one by one."""
        return any(".mlp.experts." in name for name in self._names)


def _modules(config) -> Iterator[str]:
    """The linear layers outside of the routed experts, whose router is no linear layer."""
    if not config.tie_word_embeddings:
        yield "lm_head"
    attention = ["q_proj"] if config.q_lora_rank is None else ["q_a_proj", "q_b_proj"]
    attention += ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    for layer in range(config.num_hidden_layers):
        yield from (f"model.layers.{layer}.self_attn.{name}" for name in attention)
        if not config.is_moe(layer):
            yield from (f"model.layers.{layer}.mlp.{name}" for name in _MLP)
        elif config.n_shared_experts:
            yield from (f"model.layers.{layer}.mlp.shared_experts.{name}" for name in _MLP)


def _experts(config) -> Iterator[str]:
    """The first and the last routed expert of each layer."""
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        for expert in {0, config.n_routed_experts - 1}:
            yield from (f"model.layers.{layer}.mlp.experts.{expert}.{name}" for name in _MLP)


_MLP = ("gate_proj", "up_proj", "down_proj")
