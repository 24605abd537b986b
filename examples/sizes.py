"""Sizes of programs: few, so that most runs find theirs compiled."""

from __future__ import annotations

from collections.abc import Iterator

_STEP = 64  # columns, and the fewest


def powers_of_two(count: int, context: int) -> int:
    """`count` columns rounded up so that few programs do, to no more than a context needs."""
    return min(1 << max(count - 1, _STEP - 1).bit_length(), multiples(context, context))


def multiples(count: int, context: int) -> int:
    """`count` columns rounded up where memory is short."""
    return -(-min(count, context) // _STEP) * _STEP


def even_batches(count: int, most: int) -> Iterator[slice]:
    """Slices of `count` requests into as few batches of at most `most` as there can be, sized alike.

    All can then run in a program for the first, and its rows are hardly ever empty.
    """
    size = -(-count // -(-count // most))
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))
