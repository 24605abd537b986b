"""Weights on huge pages: a CPU that goes through some of their columns meets a new page at almost every row."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import jax

_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; before, it is refused
# Bytes. Linux copies every page, and a large model is not waited for.
_MOST = 512 << 20


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Asks Linux to lay small models' arrays on huge pages; their values and addresses stay.

    Returns:
      Huge pages that there are now; 0 where the system grants none, on another device, or above 512 MiB.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return 0
    arrays = [a for a in arrays if len(a.devices()) == 1]
    if sum(a.nbytes for a in arrays) > _MOST:
        return 0
    pages = set()
    for array in arrays:
        start = array.unsafe_buffer_pointer()
        pages.update(range(start // _PAGE, -(-(start + array.nbytes) // _PAGE)))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return sum(madvise(page * _PAGE, _PAGE, _MADV_COLLAPSE) == 0 for page in pages)
