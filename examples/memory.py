"""Whether what a program is about to hold fits, asked before XLA is: on a CPU it may abort the process if not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import resource

import jax

_WAY_ROUND = "lower --batch_size or --max_new_tokens"
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int | None:
    """Bytes that the first device can still give; None where nothing tells.

    On a CPU the least of what the machine has left, what `ulimit -v` leaves of address space, and what a container
    may take beside the pages of files.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform != "cpu":
        return None
    return min(
        (n for n in (_machine(), _address_space(), _container()) if n is not None), default=None
    )


def check(needed: int, what: str):
    """Raises MemoryError, with the flags to lower, if `needed` bytes for `what` are more than are free."""
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"out of memory: {what} take {_gb(needed)}, and {_gb(max(free, 0))} are free: {_WAY_ROUND}"
        )


@contextlib.contextmanager
def naming_flags():
    """Says of an allocation that failed which flags to lower.

    Raises:
      MemoryError: in place of XLA's, jaxlib's or Python's own.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, MemoryError) and _WAY_ROUND in text:
            raise
        exhausted = "RESOURCE_EXHAUSTED" in text or "bad_alloc" in text
        if not exhausted and not isinstance(error, MemoryError):
            raise
        count = re.search(r"allocat\w*\s+(\d+)\s*bytes", text)
        asked = f" at {_gb(int(count[1]))} more" if count else ""
        raise MemoryError(f"out of memory{asked}: {_WAY_ROUND}") from error


def _machine() -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _address_space() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read("/proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return limit - int(pages[0]) * _PAGE


def _container() -> int | None:
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = re.search(r"^anon (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    return int(limit) - int(used[1]) if limit.isdecimal() and used else None


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
