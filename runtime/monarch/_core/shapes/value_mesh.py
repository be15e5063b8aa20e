"""Meshes of values: the answers of the members of a mesh, each at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import index
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, overload

from monarch._core.shapes.extent import Extent, Point, axes_text, no_rank
from monarch._core.shapes.mesh_view import MakesViews
from monarch._core.shapes.pairs import Pair
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.region import AxisIndex, Region
from monarch._core.shapes.shape import Shape
from monarch._core.text.tables import html_table, rich_table, same_value, text_table, value_text
from monarch.exceptions import ShapeError

if TYPE_CHECKING:
    from typing_extensions import Self

R = TypeVar("R")
S = TypeVar("S")

_full = lru_cache(maxsize=1024)(Region.full)

SHOWN = 32
"""Maximum number of rows of a displayed value mesh."""


_ADVICE = "it holds a value for each rank: .values() is their list, [0] that of rank 0"


class Deferred(Generic[R]):
    """A value that is loaded once, at the first read; a load that raised is retried."""

    __slots__ = ("_load", "_lock", "_value")

    _value: R

    def __init__(self, load: Callable[[], R]) -> None:
        self._load: Callable[[], R] | None = load
        # A load may consume its input, so two threads must not both run it.
        self._lock = RLock()

    def read(self) -> R:
        """Return the value; raises what loading it raises."""
        with self._lock:
            if self._load is not None:
                self._value = self._load()
                self._load = None
            return self._value


class ValueMesh(MakesViews, Generic[R]):
    """One value for each member of a mesh. Iterating gives ``(Point, value)`` pairs in rank order; ``values()`` is the
    list of values.

    ``mesh[3]`` and ``mesh[-1]`` are the values of single ranks. ``mesh[1:3]`` is a mesh of ranks along one axis, named
    ``ranks`` if there were several. ``mesh["gpus", 1]`` or ``mesh[{"gpus": 1}]`` indexes by axes: the value if no axis
    is left, else the mesh of the remaining axes. Views share the values.

    It displays as a table in which adjacent ranks with equal values are folded; arrays and tensors are compared by
    their contents. Values of a slice are shown with the ranks of their mesh and the index here: ``ranks 1-3 at [0:3]``.

    Args:
        axes: extent of the mesh, or a region or shape with that extent.
        values: in rank order; each may be a ``Deferred``, which is loaded at the first read.

    Raises:
        ShapeError: the numbers of values and members differ.
    """

    __slots__ = ("__weakref__", "_cells", "_ranks_of_cells", "_region")

    def __init__(self, axes: Extent | Region | Shape | Mapping[str, int], values: Iterable[R | Deferred[R]]) -> None:
        extent = axes.extent if isinstance(axes, (Region, Shape)) else Extent.of(axes)
        self._region = Region.full(extent)
        self._cells: list[R | Deferred[R]] = list(values)
        self._ranks_of_cells: Callable[[], Sequence[int]] | None = None
        if len(self._cells) != extent.nelements:
            raise ShapeError(
                f"expected {extent.nelements} values in rank order for a mesh of {axes_text(extent)}, "
                f"got {len(self._cells)}"
            )

    @classmethod
    def of(cls, extent: Extent, values: list[Any], ranks: Callable[[], Sequence[int]] | None = None) -> ValueMesh[Any]:
        """Return the mesh of values known to fill the extent; nothing is checked or copied.

        Args:
            extent: the extent of the mesh.
            values: in rank order.
            ranks: returns the rank that each value came from, which is shown where it differs from its rank here.
        """
        mesh = object.__new__(cls)
        mesh._region, mesh._cells, mesh._ranks_of_cells = _full(extent), values, ranks
        return mesh

    @classmethod
    def from_indexed(cls, axes: Extent | Region | Shape | Mapping[str, int], items: Iterable[tuple[int, R]]) -> Self:
        """Return the mesh of ``(rank, value)`` pairs in any order; the last pair of a rank counts.

        Raises:
            ShapeError: the pairs do not name each rank of the mesh.
        """
        known = dict(items)
        count = (axes.extent if isinstance(axes, (Region, Shape)) else Extent.of(axes)).nelements
        if known.keys() != set(range(count)):
            raise ShapeError(f"expected a value for each of ranks 0-{count - 1}, got {describe_ranks(sorted(known))}")
        return cls(axes, [known[rank] for rank in range(count)])

    def _view(self, region: Region) -> Self:
        view = object.__new__(type(self))
        view._region, view._cells, view._ranks_of_cells = region, self._cells, self._ranks_of_cells
        return view

    def _read(self, cell: int) -> R:
        value = self._cells[cell]
        if isinstance(value, Deferred):
            value = self._cells[cell] = cast("Deferred[R]", value).read()
        return value

    def get(self, rank: int) -> R:
        """Return the value of a rank of this mesh, negative ones counted from the end; PointError for others."""
        count = len(self)
        if not -count <= rank < count:
            raise no_rank(self.extent, rank)
        return self._read(self._region.base_rank(rank % count))

    def item(self, /, **coords: int) -> R:
        """Return the value at a point, given one coordinate for each axis.

        Raises:
            AxisError: an axis is unknown or missing.
            PointError: a coordinate is out of range.
        """
        return self.get(self.extent.rank_of(**coords))

    def values(self) -> list[R]:
        """Return the values in rank order."""
        return [self._read(cell) for cell in self._region.base_ranks()]

    def items(self) -> Iterator[tuple[Point, R]]:
        """Point and value of each member in rank order; each value is loaded when the iterator reaches it."""
        return zip(self.coordinates, map(self._read, self._region.base_ranks()), strict=True)

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True
        if name.startswith("_"):
            raise AttributeError(f"'ValueMesh' object has no attribute {name!r}")
        raise AttributeError(f"a ValueMesh has no attribute {name!r}; {_ADVICE}")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be an array, which NumPy and Matplotlib ask for."""
        __tracebackhide__ = True
        raise TypeError(f"a ValueMesh is no array; {_ADVICE}")

    def __float__(self) -> NoReturn:
        __tracebackhide__ = True
        raise TypeError(f"a ValueMesh is no number; {_ADVICE}")

    __int__ = __float__

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return map(Pair, self.items())

    def map(self, function: Callable[[R], S]) -> ValueMesh[S]:
        """Return the mesh of ``function(value)`` of each value."""
        came = self._came_from()
        return ValueMesh.of(self.extent, list(map(function, self.values())), (lambda: came) if came else None)

    @overload
    def __getitem__(self, key: int) -> R: ...
    @overload
    def __getitem__(self, key: slice) -> ValueMesh[R]: ...
    @overload
    def __getitem__(self, key: Mapping[str, AxisIndex] | tuple[str | AxisIndex, ...]) -> Any: ...
    def __getitem__(self, key: object) -> Any:
        if isinstance(key, slice):
            return self._ranks(cast("slice[Any, Any, Any]", key))
        if isinstance(key, Mapping):
            return self._at(dict(cast("Mapping[str, AxisIndex]", key)))
        if isinstance(key, tuple):
            parts = cast("tuple[Any, ...]", key)
            if parts and len(parts) % 2 == 0 and all(isinstance(name, str) for name in parts[::2]):
                return self._at(dict(zip(parts[::2], parts[1::2], strict=True)))
        elif hasattr(key, "__index__"):
            return self.get(index(cast("int", key)))
        label = next(iter(self.extent), "gpus")
        raise ShapeError(
            f"a mesh of {axes_text(self.extent)} cannot be indexed by {key!r}; give a rank as in [0], a range as in "
            f"[0:2], or an axis and a coordinate as in [{label!r}, 0]"
        )

    def _ranks(self, chosen: slice) -> ValueMesh[R]:
        if self.ndim == 1:
            return self.slice(**{self.extent.labels[0]: chosen})
        # A range may cut across the axes, so list these cells; a deferred value still loads once.
        came = self._came_from()
        extent = Extent(("ranks",), (len(self),))
        flat = ValueMesh.of(
            extent, [self._cells[cell] for cell in self._region.base_ranks()], (lambda: came) if came else None
        )
        return flat.slice(ranks=chosen)

    def _at(self, axes: dict[str, AxisIndex]) -> R | ValueMesh[R]:
        part = self.slice(**axes)
        return part if part.ndim or not axes else part.get(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.extent, self.values())

    def __repr__(self) -> str:
        rows = [
            (f"{row[0]} ({row[1]}):" if row[1] else f"{row[0]}:", row[2]) if len(row) > 1 else row
            for row in self._rows()
        ]
        return f"{self._title()}\n{text_table([], rows, SHOWN + 1, gap=' ')}"

    def _repr_html_(self) -> str:
        return html_table(*self._columns(), SHOWN + 1, title=self._title())

    def __rich__(self) -> Any:
        return rich_table(*self._columns(), SHOWN + 1, title=self._title())

    def _columns(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return headers and rows of the table."""
        rows = self._rows()
        return (["ranks", "at", "value"], rows) if self.ndim > 1 else (["ranks", "value"], [row[::2] for row in rows])

    def _title(self) -> str:
        return f"{type(self).__name__}({axes_text(self.extent) if self.ndim else ''})"

    def _rows(self) -> list[tuple[str, ...]]:
        """Yield rows of ranks, shared coordinates and value; or one cell for omitted rows."""
        half, last = SHOWN // 2, len(self) - 1
        rows: list[tuple[str, ...]] = []
        start = 0
        while start <= last and len(rows) < half:
            end, text = self._run(start, 1, last)
            rows.append(self._row(start, end, text))
            start = end + 1
        below: list[tuple[str, ...]] = []
        # From the end backwards, so that values in the middle are not even loaded.
        while start <= last and len(below) < half:
            first, text = self._run(last, -1, start)
            below.append(self._row(first, last, text))
            last = first - 1
        if start <= last:
            rows.append((f"… {last - start + 1} more ranks",))
        return rows + below[::-1]

    def _run(self, start: int, step: int, last: int) -> tuple[int, str]:
        """Return the end of the run of equal values that begins at a rank, and their text."""
        value, text = self._shown(start)
        end = start
        while end != last:
            following, its_text = self._shown(end + step)
            if its_text != text or not same_value(value, following, text):
                break
            end += step
        return end, text

    def _shown(self, rank: int) -> tuple[object, str]:
        try:
            value = self.get(rank)
        except Exception as error:
            # A value that fails to load must not hide the others.
            return error, f"<not readable: {value_text(error)}>"
        return value, value_text(value)

    def _row(self, first: int, last: int, text: str) -> tuple[str, ...]:
        low, high = Point(first, self.extent), Point(last, self.extent)
        shared: list[str] = []
        for label in self.extent if self.ndim > 1 else ():
            if low[label] != high[label]:
                break
            shared.append(f"{label}={low[label]}")
        return self._name_of(range(first, last + 1)), ", ".join(shared), text

    def _came_from(self) -> list[int]:
        """Return the rank that each value came from; empty if unknown."""
        known = self._ranks_of_cells() if self._ranks_of_cells is not None else ()
        return [known[cell] for cell in self._region.base_ranks()] if known else []

    def _name_of(self, own: range) -> str:
        """Describe ranks: by the numbers of their mesh, and the index here in brackets if it differs."""
        came = self._came_from()[own.start : own.stop]
        if not came or came == list(own):
            return describe_ranks(own)
        index = f"[{own.start}]" if len(own) == 1 else f"[{own.start}:{own.stop}]"
        return f"{describe_ranks(came)} at {index}"
