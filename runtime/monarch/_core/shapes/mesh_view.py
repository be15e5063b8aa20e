"""The common part of all meshes: their axes, and views, which need no communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch._core.shapes.extent import Extent, Point
from monarch._core.shapes.region import AxisIndex, Region, SplitArgument

if TYPE_CHECKING:
    from typing_extensions import Self


class MakesViews:
    """Mixin of every mesh: methods that return views, which are the same members addressed in another way.

    None of them sends messages. A subclass has a ``_region``; ``_view`` makes the mesh of another region.
    """

    __slots__ = ()

    _region: Region

    def _view(self, region: Region) -> Self:
        raise NotImplementedError

    def slice(self, /, **axes: AxisIndex) -> Self:
        """Return a part of the mesh: ``slice(hosts=0, gpus=slice(0, 4))``.

        An int removes its axis, a range keeps it. Both work as in a list: negative ones count from the end, and a range
        may have a positive step.

        Raises:
            AxisError: an axis is unknown.
            PointError: a coordinate is out of range.
            ShapeError: a range is empty, or an axis has another type of index, such as a list.
        """
        return self._view(self._region.slice(**axes))

    def split(self, /, **axes: SplitArgument) -> Self:
        """Return the same members with axes split: ``split(hosts=("racks", "hosts"), racks=2)``.

        Give each axis its new axes, outermost first, and all of their sizes, or all but one.

        Raises:
            AxisError: an axis is unknown.
            ShapeError: sizes are missing or do not multiply to the size of their axis, or a name occurs twice.
        """
        return self._view(self._region.split(**axes))

    def flatten(self, name: str) -> Self:
        """Return the same members along one axis. ShapeError for a slice whose ranks are not evenly spaced."""
        return self._view(self._region.flatten(name))

    def rename(self, /, **axes: str) -> Self:
        """Return the same members with axes renamed: ``rename(old="new")``.

        Raises:
            AxisError: an axis is unknown.
            ShapeError: a new name is invalid, or another axis has it.
        """
        return self._view(self._region.rename(**axes))

    def size(self, axis: str | Sequence[str] | None = None) -> int:
        """Return the number of members along one axis, along several (their product), or in all. AxisError for an
        unknown one."""
        return self._region.size(axis)

    @property
    def extent(self) -> Extent:
        """The axes, outermost first, each with its size."""
        return self._region.extent

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(self._region.extent)

    @property
    def coordinates(self) -> list[Point]:
        """The point of each member, in rank order."""
        extent = self._region.extent
        return [Point(rank, extent) for rank in range(extent.nelements)]

    @property
    def ndim(self) -> int:
        """The number of axes; 0 for a single member."""
        return self._region.ndim

    def __len__(self) -> int:
        return self._region.nelements
