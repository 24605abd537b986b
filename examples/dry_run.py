"""What `generate.py --dry_run` prints: the bytes of a checkpoint, and the context that they leave."""

from __future__ import annotations

import os

import jax
import model_flags
from dtypes import dtypes
from one_line_errors import show
from splitting import check_split

from ddtree_jax.models.footprint import RESERVE, footprint

_BATCHES = (1, 4, 16, 64)


def device_bytes(device) -> int:
    """Bytes that a JAX device can hold: the allocator's limit, or the machine's memory for a CPU."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def print_report(devices: int | None, device_gb: float | None, mesh: int | None):
    """Prints the report on the pair that the flags name.

    Args:
      devices: how many to count with; those that JAX sees by default.
      device_gb: memory of one, in 1e9 bytes; what JAX says by default.
      mesh: how many, split as `--mesh` does, in place of `devices`.

    Raises:
      OSError, ValueError: as `report`, or a mesh that does not divide the target.
    """
    seen = jax.devices()
    target_path, drafter_path = model_flags.paths()
    ignore = model_flags.IGNORE_CONFIG.value
    count = mesh or devices or len(seen)
    if mesh:
        check_split(target_path, mesh, ignore)
    kinds = dtypes(model_flags.DTYPE.value, model_flags.PARAM_DTYPE.value, devices=count)
    show(
        report(
            target_path,
            drafter_path,
            count,
            device_bytes(seen[0]) if device_gb is None else int(device_gb * 1e9),
            mesh=bool(mesh),
            cache_dtype=model_flags.CACHE_DTYPE.value,
            ignore_config=ignore,
            **kinds,
        )
        + "\n"
    )


def report(
    target_path,
    drafter_path,
    devices: int,
    each: int,
    *,
    dtype: str,
    param_dtype: str | None = None,
    mesh: bool = False,
    cache_dtype: str | None = None,
    ignore_config=(),
) -> str:
    """The report, a line a fact.

    Args:
      target_path, drafter_path: folders; no drafter counts none.
      devices: how many.
      each: bytes of one.
      dtype: of the arithmetic.
      param_dtype: of everything but packed experts, as `load_target` takes it; `dtype` by default.
      mesh: count with what `--mesh` keeps whole on every device; else weights are split evenly.
      cache_dtype: of the target's cache; `dtype` by default.
      ignore_config: keys of either config.json to take as absent.

    Raises:
      FileNotFoundError, ValueError: as `footprint`.
    """
    kinds = {"dtype": dtype, "param_dtype": param_dtype, "cache_dtype": cache_dtype}
    size = footprint(target_path, drafter_path, **kinds, ignore_config=ignore_config)
    held = "as stored" if param_dtype == "stored" else param_dtype or dtype
    share = size.per_device(devices, mesh=mesh)
    contexts = [size.context(devices, each, batch=batch, mesh=mesh) for batch in _BATCHES]
    lines = [
        f"routed experts {_gb(size.experts)}, rest of the target {_gb(size.rest)} ({held}), "
        f"drafter {_gb(size.drafter)}: {_gb(size.weights)}",
        f"caches: {size.row:,} bytes a position of a request (latents in {cache_dtype or dtype})",
        f"{devices} x {_gb(each)}: {_gb(share)} of weights on each, {_gb(RESERVE)} kept back",
    ]
    if contexts[0] == 0:
        lines.append(f"does not fit: {_gb(share + RESERVE)} needed on each device")
    else:
        pairs = zip(_BATCHES, contexts, strict=True)
        lines.append(
            "fits; positions a request: "
            + ", ".join(f"batch {batch} {positions:,}" for batch, positions in pairs)
        )
    if mesh:
        lines.append(
            f"(as --mesh splits it: {_gb(size.whole)} of the target, the drafter and the caches on every device)"
        )
    elif devices > 1:
        lines.append("(weights split evenly, caches on every device; --mesh N counts as it splits)")
    return "\n".join(lines)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
