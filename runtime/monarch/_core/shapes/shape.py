"""Shapes and slices of ranks, and selections, by the names that torchmonarch gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import index
from typing import Any, overload

from monarch._core.shapes.extent import Extent, Frozen, put, row_major
from monarch._core.shapes.region import Region
from monarch.exceptions import ShapeError


class NDSlice(Frozen):
    """Ranks that lie at regular steps along any number of dimensions, without names.

    Args:
        offset: the first rank.
        sizes: how many ranks there are along each dimension.
        strides: how many ranks one step along each dimension skips.

    Raises:
        ShapeError: the numbers of sizes and strides differ, or one is negative.
    """

    __slots__ = ("_offset", "_sizes", "_strides")

    _offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        put(self, "_offset", index(offset))
        put(self, "_sizes", tuple(index(size) for size in sizes))
        put(self, "_strides", tuple(index(stride) for stride in strides))
        if len(self._sizes) != len(self._strides):
            raise ShapeError(f"expected one stride for each of {len(sizes)} sizes, got {len(strides)} strides")
        if min((self._offset, *self._sizes, *self._strides)) < 0:
            raise ShapeError(f"offset, sizes and strides must not be negative, got {self!r}")

    @staticmethod
    def new_row_major(sizes: Sequence[int]) -> NDSlice:
        """Return the slice of all ranks of a mesh with these sizes."""
        return NDSlice(offset=0, sizes=sizes, strides=row_major(tuple(sizes)))

    @staticmethod
    def from_list(ranks: Sequence[int]) -> list[NDSlice]:
        """Return slices of one dimension that together have these ranks, in order."""
        found: list[NDSlice] = []
        rest = list(ranks)
        while rest:
            step = rest[1] - rest[0] if len(rest) > 1 and rest[1] > rest[0] else 1
            count = 1
            while count < len(rest) and rest[count] == rest[0] + count * step:
                count += 1
            found.append(NDSlice(offset=rest[0], sizes=[count], strides=[step]))
            del rest[:count]
        return found

    @property
    def offset(self) -> int:
        """The first rank."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """The number of ranks along each dimension."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """How many ranks one step along each dimension skips."""
        return list(self._strides)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)

    def nditem(self, coordinates: Sequence[int]) -> int:
        """Return the rank at coordinates.

        Raises:
            ShapeError: there are more or fewer coordinates than dimensions.
        """
        if len(coordinates) != self.ndim:
            raise ShapeError(f"expected {self.ndim} coordinates, got {len(coordinates)}")
        return self._offset + sum(at * stride for at, stride in zip(coordinates, self._strides, strict=True))

    def coordinates(self, rank: int) -> list[int]:
        """Return the coordinates of a rank; ShapeError if it is not in the slice."""
        position = self.index(rank)
        return [position // step % size for step, size in zip(row_major(self._sizes), self._sizes, strict=True)]

    def index(self, rank: int) -> int:
        """Return the row-major position of a rank.

        Raises:
            ShapeError: it is not in the slice.
        """
        try:
            return list(self).index(rank)
        except ValueError:
            raise ShapeError(f"rank {rank} is not in {self!r}") from None

    def get(self, position: int) -> int:
        """Return the rank at a row-major position.

        Raises:
            ShapeError: the position is out of range.
        """
        if not 0 <= position < len(self):
            raise ShapeError(f"position {position} is out of range of {self!r}, which has {len(self)} ranks")
        steps = zip(row_major(self._sizes), self._sizes, strict=True)
        return self.nditem([position // step % size for step, size in steps])

    def __len__(self) -> int:
        return prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return map(self.get, range(len(self)))

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[int, ...]: ...
    def __getitem__(self, key: int | slice) -> int | tuple[int, ...]:
        if isinstance(key, slice):
            return tuple(map(self.get, range(*key.indices(len(self)))))
        return self.get(range(len(self))[key])

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, NDSlice) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self._offset, self._sizes, self._strides

    def __repr__(self) -> str:
        return f"NDSlice(offset={self._offset}, sizes={self.sizes}, strides={self.strides})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _slice, self._key()


class Shape(Frozen):
    """Ranks along named axes: a slice of ranks with a label for each of its dimensions.

    Args:
        labels: the names of the axes, outermost first.
        slice: their ranks.

    Raises:
        ShapeError: the numbers of labels and dimensions differ.
    """

    __slots__ = ("_labels", "_slice")

    # As Python does for a class with __eq__.
    __hash__ = None  # pyright: ignore[reportAssignmentType]
    _labels: tuple[str, ...]
    _slice: NDSlice

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        if len(labels) != slice.ndim:
            raise ShapeError(f"expected one label for each of {slice.ndim} dimensions, got {list(labels)}")
        put(self, "_labels", tuple(labels))
        put(self, "_slice", slice)

    @staticmethod
    def unity() -> Shape:
        """Return the shape of rank 0 alone, without axes."""
        return Shape([], NDSlice.new_row_major([]))

    @staticmethod
    def of(region: Region) -> Shape:
        """Return the shape of a view."""
        return Shape(region.labels, NDSlice(offset=region.offset, sizes=region.sizes, strides=region.strides))

    @property
    def labels(self) -> list[str]:
        """The names of the axes, outermost first."""
        return list(self._labels)

    @property
    def ndslice(self) -> NDSlice:
        """The ranks."""
        return self._slice

    @property
    def extent(self) -> Extent:
        """The axes with their sizes."""
        return Extent(self._labels, self._slice.sizes)

    @property
    def region(self) -> Region:
        """The same ranks as a view of a mesh."""
        return Region(self._labels, self._slice.offset, self._slice.sizes, self._slice.strides)

    def at(self, label: str, index: int) -> Shape:
        """Return the part at one coordinate of an axis, without this axis.

        Raises:
            ShapeError: the mesh has no axis of this name, or the coordinate is out of range.
        """
        self._check(label)
        if not 0 <= index < self._slice.sizes[self._labels.index(label)]:
            raise ShapeError(f"coordinate {index} is out of range along axis {label!r} of {self}")
        return Shape.of(self.region.slice(**{label: index}))

    def select(self, label: str, slice: slice) -> Shape:
        """Return a range of one axis, which stays an axis."""
        self._check(label)
        return Shape.of(self.region.slice(**{label: slice}))

    def index(self, **coordinates: int) -> Shape:
        """Return the part at coordinates of some axes, without these axes."""
        part = self
        for label, coordinate in coordinates.items():
            part = part.at(label, coordinate)
        return part

    def ranks(self) -> list[int]:
        """Return the ranks in row-major order."""
        return list(self._slice)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by axis; ShapeError if it is not in the shape."""
        return dict(zip(self._labels, self._slice.coordinates(rank), strict=True))

    def _check(self, label: str) -> None:
        if label not in self._labels:
            raise ShapeError(f"no axis {label!r}; the shape has {self}")

    def __len__(self) -> int:
        return len(self._slice)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return (self._labels, self._slice) == (other._labels, other._slice)

    def __str__(self) -> str:
        sizes = zip(self._labels, self._slice.sizes, strict=True)
        return "{" + ",".join(f"{label}={size}" for label, size in sizes) + "}"

    def __repr__(self) -> str:
        return f"Shape(labels={self.labels}, slice={self._slice!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shape, (self.labels, self._slice)


def _slice(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> NDSlice:
    return NDSlice(offset=offset, sizes=sizes, strides=strides)
