"""Regions: views of a mesh as strided boxes of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from operator import index
from typing import Any, TypeGuard, cast

from monarch._core.shapes.extent import (
    Extent,
    Frozen,
    axes_text,
    check_axes,
    coordinate,
    no_axis,
    no_rank,
    put,
    row_major,
)
from monarch.exceptions import PointError, ShapeError

AxisIndex = int | slice
"""The index of one axis: a coordinate, or a range."""
SplitArgument = Sequence[str] | int
"""An argument of ``split``: the new axes of an existing axis, or the size of a new axis."""
Packed = tuple[tuple[str, ...], int, tuple[int, ...], tuple[int, ...]]
"""A region for the wire: labels, offset, sizes, strides."""


class Region(Frozen):
    """A view of a spawned mesh: which of its ranks (base ranks), in which order, along which axes.

    The member at coordinates ``c`` has the base rank ``offset + sum(c * strides)``; its place in the view is its
    position, the row-major number of ``c``. Only ``base_ranks`` takes time or memory for each rank.

    Args:
        labels: names of the axes, outermost first.
        offset: base rank of the first member.
        sizes: number of members along each axis.
        strides: how many base ranks one step along each axis skips. A step along an axis must reach past all that the
            later axes cover, so that base ranks are unique and positions ascend with them.

    Raises:
        ShapeError: these cannot be the axes of a view.
    """

    __slots__ = ("_extent", "_ranks", "labels", "nelements", "offset", "sizes", "strides")

    labels: tuple[str, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    nelements: int
    _extent: Extent | None
    _ranks: list[int] | None

    def __init__(self, labels: Iterable[str], offset: int, sizes: Iterable[int], strides: Iterable[int]) -> None:
        names, counts = check_axes(labels, sizes)
        steps = tuple(strides)
        fits, covered = len(steps) == len(counts) and offset >= 0, 0
        for size, step in zip(reversed(counts), reversed(steps), strict=False):
            fits = fits and step > covered
            covered += (size - 1) * step
        if not fits:
            raise ShapeError(
                f"offset {offset} and strides {steps} do not fit axes {names} of sizes {counts}; "
                f"each axis needs a stride beyond what the later axes cover"
            )
        put(self, "labels", names)
        put(self, "offset", offset)
        put(self, "sizes", counts)
        put(self, "strides", steps)
        put(self, "nelements", prod(counts))
        put(self, "_extent", None)
        put(self, "_ranks", None)

    @classmethod
    def full(cls, extent: Extent) -> Region:
        """Return the region of all ranks of a mesh of this extent."""
        return cls(extent.labels, 0, extent.sizes, row_major(extent.sizes))

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Region:
        """Return the region that ``pack`` packed, lists in place of tuples allowed; ShapeError if it is invalid."""
        try:
            labels, offset, sizes, strides = packed
            return cls(labels, index(offset), sizes, [index(stride) for stride in strides])
        except TypeError:
            raise ShapeError(f"region: expected labels, offset, sizes and strides, got {packed!r}") from None
        except ShapeError:
            raise
        except ValueError:
            raise ShapeError(f"region: expected 4 fields (labels, offset, sizes, strides), got {len(packed)}") from None

    def pack(self) -> Packed:
        """Return labels, offset, sizes and strides: everything that is sent."""
        return self.labels, self.offset, self.sizes, self.strides

    @property
    def extent(self) -> Extent:
        """The axes of the view with their sizes."""
        if self._extent is None:
            put(self, "_extent", Extent(self.labels, self.sizes))
        assert self._extent is not None
        return self._extent

    @property
    def ndim(self) -> int:
        """The number of axes of the view."""
        return len(self.labels)

    def size(self, axis: str | Sequence[str] | None = None) -> int:
        """Return the number of members along one axis, along several (their product), or in all. AxisError for an
        unknown one."""
        if axis is None:
            return self.nelements
        return self.extent[axis] if isinstance(axis, str) else prod(self.extent[label] for label in axis)

    def base_ranks(self) -> list[int]:
        """Return the base ranks of the members in the view's row-major order; cached, so do not change it."""
        if self._ranks is None:
            ranks = [self.offset]
            for size, stride in zip(self.sizes, self.strides, strict=True):
                steps = range(0, size * stride, stride)
                ranks = [rank + step for rank in ranks for step in steps]
            put(self, "_ranks", ranks)
        assert self._ranks is not None
        return self._ranks

    def base_rank(self, position: int) -> int:
        """Return the base rank of the member at a position, 0 to ``nelements - 1``; PointError for any other."""
        if not 0 <= position < self.nelements:
            raise no_rank(self.extent, position)
        rank = self.offset
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            position, step = divmod(position, size)
            rank += step * stride
        return rank

    def position_of(self, base_rank: int) -> int | None:
        """Return the position of a base rank in the view, None if it is not in it."""
        rest = base_rank - self.offset
        if rest < 0:
            return None
        position = 0
        # Strict pairing costs time here; the constructor has checked the lengths.
        for size, stride in zip(self.sizes, self.strides):  # noqa: B905
            step, rest = divmod(rest, stride)
            if step >= size:
                return None
            position = position * size + step
        return None if rest else position

    def place_of(self, base_rank: int) -> int:
        """Return the position of a base rank in the view; PointError if it is not in it."""
        position = self.position_of(base_rank)
        if position is None:
            raise PointError(
                f"base rank {base_rank} is not in this view of {axes_text(self.extent)}; "
                f"the view has offset {self.offset} and strides {self.strides}"
            )
        return position

    def slice(self, /, **axes: AxisIndex) -> Region:
        """Return a part of the view: an int removes its axis, a range (with or without a step) keeps it; as in a list.

        Raises:
            AxisError: an axis is unknown.
            PointError: a coordinate is out of range.
            ShapeError: a range is empty or has a step below 1, or an axis has another type of index.
        """
        for label in axes:
            if label not in self.labels:
                raise no_axis(self.extent, label)
        offset = self.offset
        kept: list[tuple[str, int, int]] = []
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
            where = axes.get(label)
            if label not in axes:
                kept.append((label, size, stride))
            elif isinstance(where, slice):
                chosen = _range(self.extent, label, where)
                offset += chosen.start * stride
                kept.append((label, len(chosen), stride * chosen.step))
            elif hasattr(where, "__index__"):
                # Slices were handled above.
                offset += coordinate(self.extent, label, where) * stride  # pyright: ignore[reportArgumentType]
            else:
                raise ShapeError(
                    f"axis {label!r} cannot be sliced with {where!r}; this mesh has {axes_text(self.extent)}: "
                    f"give an int, or a range such as slice(0, 2)"
                )
        return _make(kept, offset)

    def split(self, /, **axes: SplitArgument) -> Region:
        """Return the same members with an axis split: ``split(hosts=("racks", "hosts"), racks=2)``.

        Give each axis its new axes, outermost first, and all of their sizes, or all but one.

        Raises:
            AxisError: an axis is unknown.
            ShapeError: sizes are missing or do not multiply to the size of their axis, or a name occurs twice.
        """
        parts = {label: _names(self.extent, label, given) for label, given in axes.items() if not _is_size(given)}
        sizes = {name: index(given) for name, given in axes.items() if _is_size(given)}
        for label in parts:
            if label not in self.labels:
                raise no_axis(self.extent, label)
        for name, size in sizes.items():
            if not any(name in names for names in parts.values()):
                raise ShapeError(
                    f"{name}={size} does not match a new axis; this mesh has {axes_text(self.extent)}: "
                    f"name the axis to split and all its new axes too, such as hosts=({name!r}, 'hosts')"
                )
        made: list[tuple[str, int, int]] = []
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
            names = parts.get(label, (label,))
            counts = _fill(self.extent, label, names, sizes) if label in parts else (size,)
            steps = row_major(counts)
            made += [(name, n, step * stride) for name, n, step in zip(names, counts, steps, strict=True)]
        return _make(made, self.offset)

    def flatten(self, name: str) -> Region:
        """Return the same members along one axis. ShapeError if their base ranks are not evenly spaced."""
        axes = [axis for axis in zip(self.labels, self.sizes, self.strides, strict=True) if axis[1] > 1]
        for (outer, _, skip), (inner, size, stride) in pairwise(axes):
            if skip != size * stride:
                raise ShapeError(
                    f"{axes_text(self.extent)} cannot become one axis {name!r}: a step along {outer!r} "
                    f"skips {skip} ranks of the spawned mesh, but {inner!r} covers {size * stride}; "
                    f"flatten before slicing, or flatten each slice along {outer!r}"
                )
        return Region((name,), self.offset, (self.nelements,), (axes[-1][2] if axes else 1,))

    def rename(self, /, **axes: str) -> Region:
        """Return the same members with axes renamed: ``rename(old="new")``; AxisError, or ShapeError for a bad name."""
        for label in axes:
            if label not in self.labels:
                raise no_axis(self.extent, label)
        return Region([axes.get(label, label) for label in self.labels], self.offset, self.sizes, self.strides)

    def __len__(self) -> int:
        return self.nelements

    def __eq__(self, other: object) -> bool:
        return self.pack() == other.pack() if isinstance(other, Region) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.pack())

    def __repr__(self) -> str:
        return f"Region({axes_text(self.extent)}; offset {self.offset}, strides {self.strides})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, self.pack()


def _make(axes: list[tuple[str, int, int]], offset: int) -> Region:
    return Region([axis[0] for axis in axes], offset, [axis[1] for axis in axes], [axis[2] for axis in axes])


def _range(extent: Extent, label: str, where: slice) -> range:
    """Return the coordinates of a range; ShapeError unless it ascends and is not empty."""
    shown = ":".join("" if part is None else str(part) for part in (where.start, where.stop, where.step))
    shown = shown[:-1] if where.step is None else shown
    try:
        chosen = range(*where.indices(extent[label]))
    except (TypeError, ValueError):
        chosen = range(0, -1, -1)
    if chosen.step < 1:
        raise ShapeError(
            f"the range {shown} of axis {label!r} needs int bounds and a step of at least 1; "
            f"this mesh has {axes_text(extent)}"
        )
    if not chosen:
        raise ShapeError(
            f"the range {shown} of axis {label!r} is empty; this mesh has {axes_text(extent)}: "
            f"choose from 0 to {extent[label] - 1}"
        )
    return chosen


def _is_size(value: SplitArgument) -> TypeGuard[int]:
    return hasattr(value, "__index__")


def _names(extent: Extent, label: str, value: object) -> tuple[str, ...]:
    """Return the new axes that an axis is split into."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return tuple(cast("Sequence[str]", value))
    raise ShapeError(
        f"axis {label!r} cannot be split into {value!r}; this mesh has {axes_text(extent)}: "
        f"give the new axes as a tuple of names, such as {label}=('outer', 'inner')"
    )


def _fill(extent: Extent, label: str, names: tuple[str, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the sizes of the new axes of one axis, inferring the one that is missing."""
    missing = [name for name in names if name not in sizes]
    known_size = prod(sizes[name] for name in names if name in sizes)
    shown = ", ".join(f"{name}={sizes.get(name, '?')}" for name in names)
    what = f"axis {label!r} cannot be split into {shown}"
    if len(missing) > 1:
        raise ShapeError(
            f"{what}; this mesh has {axes_text(extent)}: give the size of all but one of {', '.join(missing)}"
        )
    if known_size < 1 or extent[label] % known_size or (not missing and known_size != extent[label]):
        raise ShapeError(f"{what}; this mesh has {axes_text(extent)}: choose sizes that multiply to {extent[label]}")
    return tuple(sizes.get(name, extent[label] // known_size) for name in names)


Extent.region = property(Region.full)
