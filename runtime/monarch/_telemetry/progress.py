"""Progress: of loops of the user, ``for batch in monarch.track(loader)``, and of long work on a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from monarch._core.kinds import is_a
from monarch._node.current import current_node, has_node
from monarch._telemetry.logged import Bar, Logged
from monarch.exceptions import ArgumentError

T = TypeVar("T")
_LONGEST = 200
"""Characters of a description."""


def track(iterable: Iterable[T], description: str = "", total: float | None = None) -> Iterator[T]:
    """Yield the items of an iterable, and report how many have been taken.

    Views of the mesh show one bar for all ranks, with the slowest and the fastest. An item costs less than a
    microsecond. Without a mesh this only yields.

    Args:
        iterable: the items to process.
        description: name of the bar; equal on all ranks.
        total: the number of items; None for the length of the iterable, if it has one.

    Raises:
        ArgumentError: the argument is not iterable, or ``total`` is not a number.
    """
    if not is_a(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        raise ArgumentError(f"track: expected an iterable, got {type(iterable).__name__}")
    if total is not None and (is_a(total, bool) or not is_a(total, int, float)):
        raise ArgumentError(f"track: expected a number as total, got {total!r}")
    return _tracked(iterable, Bar(str(description)[:_LONGEST], _length(iterable) if total is None else total, "it"))


def _tracked(iterable: Iterable[T], bar: Bar) -> Iterator[T]:
    if has_node():
        current_node().part(Logged).add_bar(bar)
    try:
        for item in iterable:
            yield item
            bar.done += 1
    finally:
        bar.ended = True


def _length(iterable: Iterable[object]) -> float:
    try:
        # It may have no length.
        return len(iterable)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 0
