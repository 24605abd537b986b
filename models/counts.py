"""Holds the counts of a config.json against the names of the weights, before anything is made of them.

A config may ask for millions of tensors that its folder does not have; names cost what the folder costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .deepseek_v3.config import KimiK26Config
from .layout import Source
from .names import layer_of

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?")


def check_layers(where: str, layers: Iterable[int], count: int, *, extra: str = ""):
    """Raises a ValueError unless the highest layer that is stored is the last of `count`.

    Args:
      where: the folder or file, for the message.
      layers: 0-based layers of tensors.
      count: `num_hidden_layers`.
      extra: what to do where there are more.
    """
    have = max(layers, default=-1) + 1
    if have != count:
        raise ValueError(
            f"{where}: tensors of {have} layers, but config.json has {count} (num_hidden_layers); "
            f"config and weights do not belong together{extra if have > count else ''}"
        )


def check_target(where: str, names: Iterable[str], config: KimiK26Config):
    """Raises a ValueError unless the weights have the layers and routed experts that the config says.

    Args:
      where: the folder or file, for the message.
      names: canonical names of the tensors, without the layers for multi-token prediction.
      config: of the same folder.
    """
    layers: set[int] = set()
    experts: dict[int, set[int]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is None:
            continue
        layers.add(layer)
        found = _EXPERT.match(name)
        if found:
            # Stacked experts have no number, and their count in their shape.
            own = experts.setdefault(layer, set())
            own.update([int(found[2])] if found[2] else [])
    more = max(layers, default=0) + 1 - config.num_hidden_layers
    check_layers(
        where,
        layers,
        config.num_hidden_layers,
        extra=f", unless the last are for multi-token prediction: then set "
        f"num_nextn_predict_layers to {config.num_nextn_predict_layers + more} in config.json",
    )
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        own = experts.get(layer)
        if own is None:
            raise ValueError(
                f"{where}: layer {layer} has no routed experts, but config.json gives it "
                f"{config.n_routed_experts} (first_k_dense_replace, moe_layer_freq, "
                "n_routed_experts); config and weights do not belong together or a file is "
                "incomplete"
            )
        if own and len(own) != config.n_routed_experts:
            raise ValueError(
                f"{where}: layer {layer} has tensors of {len(own)} routed experts, but config.json "
                f"has {config.n_routed_experts} (n_routed_experts); config and weights do not "
                "belong together or a file is incomplete"
            )


def first_sources(config: KimiK26Config) -> Iterator[Source]:
    """Tensors whose shapes say vocabulary, width, layers and experts, however the experts are stored."""
    yield Source("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    for layer in range(config.num_hidden_layers):
        yield Source(f"model.layers.{layer}.input_layernorm.weight", (config.hidden_size,))
        if config.is_moe(layer):
            shape = (config.n_routed_experts, config.hidden_size)
            yield Source(f"model.layers.{layer}.mlp.gate.weight", shape)
