"""What `generate.py --dry_run` prints: the bytes of a checkpoint, and the context that they leave."""

from __future__ import annotations

import os

from ddtree_jax.models.footprint import RESERVE, footprint

_BATCHES = (1, 4, 16, 64)


def device_bytes(device) -> int:
    """Bytes that a JAX device can hold: the allocator's limit, or the machine's memory for a CPU."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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

    Raises:
      FileNotFoundError, ValueError: as `footprint`; fewer than one device or byte.
    """
    if devices < 1 or each < 1:
        raise ValueError(f"--devices and --device_gb must be above 0, not {devices} and {each}")
    kinds = {"dtype": dtype, "param_dtype": param_dtype, "cache_dtype": cache_dtype}
    size = footprint(target_path, drafter_path, **kinds)
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
