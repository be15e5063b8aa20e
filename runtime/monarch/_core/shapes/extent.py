"""Extents (the axes of a mesh with their sizes), and points in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from operator import index
from typing import Any, NoReturn, TypeVar

from monarch._core.kinds import is_list
from monarch.exceptions import AxisError, PointError, ShapeError

put = object.__setattr__
A = TypeVar("A")


class Frozen:
    """Base of immutable values; ``put`` sets their slots during construction."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot set {name!r}: {type(self).__name__} objects are immutable; make a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r}: {type(self).__name__} objects are immutable")


class Axes(tuple[A, ...]):
    """Labels or sizes of an extent: a tuple that also equals a list of the same items."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if is_list(other) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Axes, (tuple(self),)


class Extent(Frozen, Mapping[str, int]):
    """The axes of a mesh, outermost first, each with its size; a read-only mapping of label to size.

    Args:
        labels: one name for each axis; identifiers, all different.
        sizes: the size of each axis, at least 1. Without axes, the extent has one point.

    Raises:
        ShapeError: a label or a size is invalid, or their numbers differ.
    """

    __slots__ = ("_strides", "labels", "nelements", "sizes")

    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    nelements: int
    """The number of points: the product of the sizes."""
    _strides: tuple[int, ...]
    region: Any
    """The Region of all ranks of a mesh with this extent; a property that region.py adds, since it builds on this."""

    def __init__(self, labels: Iterable[str], sizes: Iterable[int]) -> None:
        names, counts = check_axes(labels, sizes)
        put(self, "labels", Axes(names))
        put(self, "sizes", Axes(counts))
        put(self, "nelements", prod(counts))
        put(self, "_strides", row_major(counts))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Extent:
        """Return the extent of a mapping of label to size, such as ``{"hosts": 2, "gpus": 4}``."""
        return sizes if isinstance(sizes, Extent) else cls(sizes.keys(), sizes.values())

    def point(self, rank: int) -> Point:
        """Return the point of a rank, from 0 to ``nelements - 1``; PointError for any other."""
        return Point(rank, self)

    def rank_of(self, /, **coords: int) -> int:
        """Return the row-major rank of a point, from one coordinate for each axis; negative ones count from the end.

        Raises:
            AxisError: an axis is unknown or missing.
            PointError: a coordinate is out of range.
        """
        for label in coords:
            if label not in self.labels:
                raise no_axis(self, label)
        rank = 0
        for label, size in zip(self.labels, self.sizes, strict=True):
            if label not in coords:
                raise AxisError(f"no coordinate for axis {label!r}; expected one for each of {axes_text(self)}")
            rank = rank * size + coordinate(self, label, coords[label])
        return rank

    def coordinate_of(self, rank: int, label: str) -> int:
        """Return the unchecked coordinate of a rank along one axis; AxisError for an unknown axis."""
        try:
            axis = self.labels.index(label)
        except ValueError:
            raise no_axis(self, label) from None
        return rank // self._strides[axis] % self.sizes[axis]

    def __getitem__(self, label: str) -> int:
        try:
            return self.sizes[self.labels.index(label)]
        except ValueError:
            raise no_axis(self, label) from None

    def __contains__(self, label: object) -> bool:
        return label in self.labels

    def __iter__(self) -> Iterator[str]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self.labels == other.labels and self.sizes == other.sizes
        # A dict is compared without order, as dicts are.
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.labels, self.sizes))

    def __repr__(self) -> str:
        return repr(dict(zip(self.labels, self.sizes, strict=True)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent, (tuple(self.labels), tuple(self.sizes))


class Point(Frozen, Mapping[str, int]):
    """A place in an extent; a read-only mapping of label to coordinate, so ``f(**point)`` works.

    Args:
        rank: its row-major number, from 0 to ``extent.nelements - 1``.
        extent: the extent of the point.

    Raises:
        PointError: the rank is out of range.
    """

    __slots__ = ("extent", "rank")

    rank: int
    extent: Extent

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise no_rank(extent, rank)
        # An integer of another library would be kept and sent as it is.
        put(self, "rank", index(rank))
        put(self, "extent", extent)

    def size(self, label: str) -> int:
        """Return the size of the extent along one axis; AxisError for an unknown axis."""
        return self.extent[label]

    def __getitem__(self, label: str) -> int:
        return self.extent.coordinate_of(self.rank, label)

    def __contains__(self, label: object) -> bool:
        return label in self.extent

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent)

    def __len__(self) -> int:
        return len(self.extent)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self.rank == other.rank and self.extent == other.extent
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {self[label]}/{size}" for label, size in self.extent.items()) + "}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self.rank, self.extent)


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many ranks one step along each axis skips in a mesh of these sizes."""
    return tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def check_axes(labels: Iterable[str], sizes: Iterable[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return labels and sizes as tuples; ShapeError if they cannot be the axes of a mesh."""
    if isinstance(labels, str):
        raise ShapeError(f"axes: expected a list of names, got {labels!r}; write [{labels!r}]")
    names, counts = tuple(labels), tuple(sizes)
    if len(names) != len(counts):
        raise ShapeError(f"axes {list(names)} do not fit sizes {list(counts)}; give one size for each axis")
    for label, size in zip(names, counts, strict=True):
        # Names and sizes come from users, so their types are unchecked.
        if not isinstance(label, str) or not label.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _bad_axes(
                names,
                counts,
                f"{label!r} cannot name an axis: must be a Python identifier",
            )
        if not hasattr(size, "__index__") or size < 1:
            raise _bad_axes(names, counts, f"the size of axis {label!r} must be an int of at least 1")
    if len(set(names)) < len(names):
        raise _bad_axes(names, counts, "axis names must be unique")
    return names, tuple(int(index(size)) for size in counts)


def _bad_axes(names: tuple[object, ...], sizes: tuple[object, ...], why: str) -> ShapeError:
    shown = ", ".join(f"{name}={size!r}" for name, size in zip(names, sizes, strict=True))
    return ShapeError(f"{shown} cannot be the axes of a mesh; {why}")


def axes_text(extent: Mapping[str, int]) -> str:
    """Return the axes as errors name them: ``hosts=2, gpus=4``, or ``no axes (one point)``."""
    return ", ".join(f"{label}={size}" for label, size in extent.items()) or "no axes (one point)"


def no_axis(extent: Extent, label: object) -> AxisError:
    """Return the error for an unknown axis; it lists the axes."""
    from difflib import get_close_matches

    near = get_close_matches(str(label), extent.labels, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return AxisError(f"no axis {label!r}; this mesh has {axes_text(extent)}{hint}")


def no_rank(extent: Extent, rank: object) -> PointError:
    """Return the error for a rank out of range; it gives the range."""
    ranks = f"ranks 0-{extent.nelements - 1}" if extent.nelements > 1 else "rank 0 only"
    return PointError(f"no rank {rank}; this mesh has {ranks} ({axes_text(extent)})")


def coordinate(extent: Extent, label: str, value: int) -> int:
    """Return a coordinate along an axis, a negative one counted from the end; PointError if it is out of range."""
    size = extent[label]
    try:
        found = int(index(value))
    except TypeError:
        raise ShapeError(
            f"the coordinate along axis {label!r} must be an int, got {value!r}; this mesh has {axes_text(extent)}"
        ) from None
    if not -size <= found < size:
        raise PointError(
            f"coordinate {found} is out of range along axis {label!r}; this mesh has {axes_text(extent)}: "
            f"give 0 to {size - 1}, or -{size} to -1 to count from the end"
        )
    return found % size
