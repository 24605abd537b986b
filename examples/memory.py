"""Whether what a program is about to hold fits, asked before XLA is: on a CPU it may end the process if not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import resource

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Address space and memory on a machine of two cores: JAX with its threads and the demo, and XLA while it compiles.
_JAX = 1_600_000_000
_COMPILER = 500_000_000


def check_start():
    """Raises MemoryError where `ulimit -v` leaves less than JAX takes: its threads would end the process."""
    free = _address_space()
    if free is not None and free < _JAX + _COMPILER:
        raise MemoryError(
            f"out of memory: ulimit -v leaves {_gb(max(free, 0))}, and JAX takes {_gb(_JAX + _COMPILER)} before any "
            "checkpoint: raise it"
        )


def free_bytes() -> int | None:
    """Bytes that the first device can still give; None where nothing tells.

    On a CPU the least of what the machine has left, what `ulimit -v` leaves of address space, and what a container
    may take beside the pages of files.
    """
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if not _on_cpu():
        return None
    return min(
        (n for n in (_machine(), _address_space(), _container()) if n is not None), default=None
    )


def check(needed: int, what: str, way_round: str, *, compiled: bool):
    """Raises MemoryError if `needed` bytes for `what` are more than are free.

    Args:
      needed: bytes on the first device.
      what: in the message.
      way_round: in the message too.
      compiled: whether nothing is left to compile; on a CPU that takes memory as well.
    """
    free = free_bytes()
    compiler = 0 if compiled or not _on_cpu() else _COMPILER
    if free is not None and needed + compiler > free:
        beside = f" beside {_gb(compiler)} to compile with" if compiler else ""
        raise MemoryError(
            f"out of memory: {what} take {_gb(needed)}{beside}, and {_gb(max(free, 0))} are free: {way_round}"
        )


@contextlib.contextmanager
def naming(way_round: str):
    """Says of an allocation that failed what to do about it.

    Raises:
      MemoryError: in place of XLA's, jaxlib's or Python's own, but not of one by `check`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        short = (
            isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "bad_alloc" in text
        )
        if not short or text.startswith("out of memory: "):
            raise
        count = re.search(r"allocat\w*\s+(\d+)\s*bytes", text)
        asked = f" at {_gb(int(count[1]))} more" if count else ""
        raise MemoryError(f"out of memory{asked}: {way_round}") from error


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


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
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
