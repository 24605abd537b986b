"""What each layer of a drafter sees, in all the ways in which a config.json says it."""

from __future__ import annotations

import dataclasses

from ..common.fields import Fields, shown, whole

_MOST = 2**30  # positions: int32 holds twice as many


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """How one drafter layer sees the block: `causal`, and a `window` of positions (None: all)."""

    causal: bool = False
    window: int | None = None

    def __post_init__(self):
        if self.window is None:
            return
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise ValueError(f"the window of a layer must be a whole number, not {self.window!r}")
        if self.window < 1:
            raise ValueError(f"the window of a layer must be at least 1, not {self.window}")
        if self.window > _MOST:
            raise ValueError(
                f"the window of a layer must be at most {_MOST}, not {shown(self.window)}"
            )

    def sees(self, ahead):
        """Whether a slot sees a column `ahead` positions after it (an array of integers)."""
        seen = (ahead <= 0) if self.causal else (ahead == ahead)
        return seen if self.window is None else seen & (abs(ahead) < self.window)


def read_layers(fields: Fields, count: int) -> tuple[DraftLayer, ...]:
    """Window and causality of each of `count` layers.

    A window for all layers, by `use_swa` (ModelOpt, MiMo) or `draft_window_size` (SGLang's setting), leaves the
    block's slots seeing each other. Layers that slide by `layer_types`, by `sliding_windows` (one a layer) or by
    Qwen3's `use_sliding_window` are causal, as DFlash's code has it, unless `causal` or `is_causal` says.

    Raises:
      ValueError: a value out of range, or keys that contradict each other.
    """
    causal = fields.flag("causal", fields.flag("is_causal", None))
    for key in ("swa_window_size", "sliding_window", "max_window_layers"):
        # Without a switch they say nothing, but a number they must be.
        if fields.whole(key, 0) > _MOST:
            raise fields.error(key, f"must be at most {_MOST}, not {shown(fields.get(key))}")
    if fields.flag("use_swa", False):
        # It wins over Qwen3's switch and layer_types, which ModelOpt leaves full.
        _kinds(fields, count)
        fields.flag("use_sliding_window", None)
        if fields.get("sliding_windows") is not None:
            raise fields.error("sliding_windows", "contradicts use_swa: one of the two")
        layers = [DraftLayer(bool(causal), fields.whole("swa_window_size"))] * count
    else:
        windows = _windows(fields, count)
        layers = [DraftLayer(w is not None if causal is None else causal, w) for w in windows]
    most = fields.whole("draft_window_size", None)
    if most is not None:
        layers = [
            DraftLayer(layer.causal, most if layer.window is None else min(most, layer.window))
            for layer in layers
        ]
    return tuple(layers)


def _windows(fields: Fields, count: int) -> list[int | None]:
    kinds = _kinds(fields, count)
    switch = fields.flag("use_sliding_window", None)
    each = fields.list("sliding_windows", None)
    if each is not None:
        if len(each) != count:
            raise fields.error("sliding_windows", f"names {len(each)} layers of {count}")
        try:
            each = [None if window is None else whole(window) for window in each]
        except ValueError as error:
            raise fields.error("sliding_windows", str(error)) from error
        # All of layer_types full is what a writer that knows no windows leaves there.
        if kinds and any(kinds) and kinds != [window is not None for window in each]:
            raise fields.error("sliding_windows", "contradicts layer_types")
        if switch is False and any(window is not None for window in each):
            raise fields.error("sliding_windows", "contradicts use_sliding_window, which is false")
        return each
    if kinds is None:
        if switch is None and fields.get("sliding_window") is not None:
            raise fields.error(
                "sliding_window",
                f"is {shown(fields.get('sliding_window'))}, but neither layer_types nor "
                "use_sliding_window says which layers slide: add use_sliding_window, true or false",
            )
        # Qwen3's rule; without max_window_layers all of them slide.
        first = fields.whole("max_window_layers", 0) if switch else count
        kinds = [layer >= first for layer in range(count)]
        if switch and not any(kinds):
            raise fields.error(
                "use_sliding_window",
                f"is true, but max_window_layers {first} leaves none of {count} layers to slide: "
                "add layer_types, or set use_sliding_window to false",
            )
    elif any(kinds) and switch is False:
        raise fields.error("use_sliding_window", "is false, but layer_types has sliding_attention")
    return [fields.whole("sliding_window") if slides else None for slides in kinds]


def _kinds(fields: Fields, count: int) -> list[bool] | None:
    """Whether each layer slides, by `layer_types`; None without them."""
    kinds = fields.list("layer_types", None)
    if kinds is None:
        return None
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{fields.where}: unknown layer type {shown(kind)}")
    if len(kinds) != count:
        raise fields.error(
            "layer_types", f"names {len(kinds)} layers, num_hidden_layers is {count}"
        )
    return [kind == "sliding_attention" for kind in kinds]
