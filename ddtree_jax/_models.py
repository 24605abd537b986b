"""Whether what is given as a target and as a drafter can be one, said at the call and not somewhere within a trace."""

from __future__ import annotations

import os

from ddtree_jax import _checks
from ddtree_jax.config import DecodeConfig

_TARGET = ("vocab_size", "max_context", "init_cache", "embed", "verify", "head")
_DRAFTER = ("block_size", "taps", "init_cache", "extend", "draft")


def check_models(target, drafter, config: DecodeConfig):
    """Refuses models that `ddtree_decode` cannot run by this config.

    Raises:
      TypeError: `config` is no `DecodeConfig`, or `target` or `drafter` has not what the loop asks of one.
      ValueError: no drafter in a mode that needs one, or one that was made for another target.
    """
    _checks.instance("config", config, DecodeConfig)
    _check("target", target, _TARGET, "drafter", _DRAFTER)
    if drafter is None:
        if config.mode != "ar":
            raise ValueError(
                f"mode {config.mode!r} needs a drafter; only mode 'ar' runs without one"
            )
        return
    _check("drafter", drafter, _DRAFTER, "target", _TARGET)
    for name in ("hidden_size", "vocab_size"):
        theirs, its = (
            getattr(model, name, getattr(getattr(model, "config", None), name, None))
            for model in (drafter, target)
        )
        if config.mode != "ar" and theirs is not None and its is not None and theirs != its:
            raise ValueError(
                f"the drafter was made for a target of {name} {theirs}, this one has {its}; "
                "give the drafter that belongs to the target"
            )


def _check(name: str, model, wanted: tuple[str, ...], other: str, others: tuple[str, ...]):
    """Raises TypeError if the model is a class, or lacks an attribute of `wanted`."""
    if isinstance(model, type):
        raise TypeError(f"{name} must be a {name} model, not the class {model.__name__}")
    missing = [attribute for attribute in wanted if not hasattr(model, attribute)]
    if not missing:
        return
    if all(hasattr(model, attribute) for attribute in others):
        hint = f", which is a {other}: are target and drafter swapped?"
    elif isinstance(model, str | os.PathLike):
        hint = f": load the folder first, with ddtree_jax.models.load_{name}"
    else:
        hint = f", which has no {missing[0]}"
    raise TypeError(
        f"{name} must be a {name} model (with {', '.join(wanted)}), not {type(model).__name__}{hint}"
    )
