"""Huge pages: the same numbers at the same place, and what the kernel says of them."""

import sys
import types

import jax
import numpy as np
import pytest

from ddtree_jax.models.huge_pages import use_huge_pages

_BYTES = 8 << 20


def _huge_kilobytes(address: int) -> int:
    """AnonHugePages of the mapping that holds the address, from /proc/self/smaps."""
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                low, high = (int(edge, 16) for edge in first.split("-"))
                inside = low <= address < high
            elif inside and first == "AnonHugePages:":
                return int(rest[0])
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is asked")
def test_values_and_addresses_stay():
    values = np.random.default_rng(0).normal(size=_BYTES // 4).astype(np.float32)
    array = jax.device_put(values.copy())
    address = array.unsafe_buffer_pointer()
    pages = use_huge_pages([array])
    assert array.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(array, values)
    if pages < _BYTES // (2 << 20):
        pytest.skip("this Linux grants no huge pages")
    assert _huge_kilobytes(address + _BYTES // 2) >= _BYTES // 2048


@pytest.mark.parametrize(("most", "asks"), [(_BYTES, True), (_BYTES - 1, False)])
def test_a_large_model_is_left_alone(monkeypatch, most, asks):
    asked = []
    system = types.SimpleNamespace(
        madvise=lambda address, size, advice: asked.append(address) or -1
    )
    monkeypatch.setattr("ctypes.CDLL", lambda name: system)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("ddtree_jax.models.huge_pages._MOST", most)
    array = jax.numpy.zeros(_BYTES // 4, np.float32)
    assert use_huge_pages([array]) == 0
    assert bool(asked) == asks
    if asks:  # every page that holds some of it
        first, end = array.unsafe_buffer_pointer(), array.unsafe_buffer_pointer() + _BYTES
        assert min(asked) <= first < min(asked) + (2 << 20)
        assert max(asked) < end <= max(asked) + (2 << 20)
