"""Checks of torch tensors before their addresses are handed on: what was wrong, and the remedy, as ValueError."""

from __future__ import annotations

import torch

#: Widest size that fits the kernels' int32 arrays.
INT32_MAX = 2**31 - 1


def tensor(
    name: str, value, shape: tuple, dtypes, like: torch.Tensor | None = None
) -> torch.Tensor:
    """`value`, if it is a contiguous tensor of one of `dtypes` whose shape matches, on `like`'s device.

    Args:
      name: what the message calls it.
      value: what the caller gave.
      shape: sizes; a string matches any size.
      dtypes: a torch dtype or a tuple of them.
      like: the tensor whose device it must share; without one it may be on the CPU or on any CUDA device.

    Raises:
      ValueError: anything else.
    """
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    names = " or ".join(str(dtype) for dtype in dtypes)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor of {names}, not {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ValueError(
            f"{name} must be {names}, not {value.dtype}: convert it with .to({dtypes[0]})"
        )
    fits = value.ndim == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join(map(str, shape)) + "]"
        raise ValueError(f"{name} must have shape {wanted}, not {list(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(
            f"{name} must be on {like.device} like the other tensors, not on {value.device}: move it "
            f"with .to('{like.device}')"
        )
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name} is on {value.device}, and the kernels run on cpu and cuda: move it with .to('cuda')"
        )
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous: call .contiguous() on it")
    return value


def aligned(name: str, value: torch.Tensor, size: int) -> None:
    """Checks that a tensor starts at a multiple of `size` bytes; a slice may not.

    Raises:
      ValueError: it does not.
    """
    if value.data_ptr() % size:
        raise ValueError(f"{name} must start at a multiple of {size} bytes: call .clone() on it")


def between(name: str, value, low: int, high: int) -> int:
    """`value` if it is an int in low .. high.

    Raises:
      ValueError: otherwise.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a Python int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in {low} .. {high}, not {value}")
    return value


def number(name: str, value) -> float:
    """`value` as a Python float that float32 holds too.

    Raises:
      ValueError: no real number, or one that is not finite in float32.
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        value = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number, not {value!r}") from error
    largest = torch.finfo(torch.float32).max
    if not abs(value) <= largest:
        raise ValueError(f"{name} must be finite in float32, at most {largest:.3g}, not {value}")
    return value


def instance(name: str, value, kind: type):
    """Raises TypeError if `value` is not of the class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, not {type(value).__name__}")


def rows(name: str, value, default: int, like: torch.Tensor) -> torch.Tensor:
    """i32[B] of one number a request; None means `default` for each."""
    if value is None:
        return torch.full(like.shape[:1], default, dtype=torch.int32, device=like.device)
    return tensor(name, value, like.shape[:1], torch.int32, like)


def layer_index(layer, layers: int, like: torch.Tensor) -> torch.Tensor:
    """A layer index as an i32 scalar on the device. A fill makes it, which a CUDA graph can hold; a copy could not."""
    if isinstance(layer, torch.Tensor):
        return tensor("layer", layer, (), torch.int32, like)
    if layers < 1:
        raise ValueError("cache must have at least one layer")
    layer = between("layer", layer, 0, layers - 1)
    return torch.full((), layer, dtype=torch.int32, device=like.device)
