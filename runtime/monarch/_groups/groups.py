"""torch process groups of meshes and slices, on their ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._actors.running import current
from monarch._core.roster import Procs
from monarch._core.shapes.region import Region
from monarch._groups.convening import PROGRAM, ensure_world
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch.exceptions import AxisError, GroupError

if TYPE_CHECKING:
    from monarch._tensors.collectives.world import World


class HasGroups:
    """Mixin of process and actor meshes: the torch process groups of their ranks."""

    if TYPE_CHECKING:
        _region: Region

        _state: Any

    def group(self, *axes: str) -> Any:
        """Return the process group of this mesh, on one of its ranks; made on first use.

        The groups over the whole mesh and along each axis are made together, so all ranks of the mesh must call this
        once. NCCL if each rank has its own GPU, with gloo for CPU tensors; gloo otherwise.

        Args:
            axes: the axes along which the ranks of the group differ; none for the whole mesh.

        Returns:
            A ``torch.distributed.ProcessGroup``. In the program, a reference that becomes one on a rank that receives
            it in a message.

        Raises:
            AxisError: the mesh has no axis of this name.
            GroupError: this process is not a rank of the mesh, or a rank has died or does not join.
        """
        for axis in axes:
            self._region.size(axis)
        if current_node().config is None:
            return _reference(self._state.procs, self._region, axes)
        return group_of(self._state.procs, self._region, axes)

    def device_mesh(self) -> Any:
        """Return a ``torch.distributed.device_mesh.DeviceMesh`` with the axes of this mesh, on one of its ranks.

        Raises:
            GroupError: as for ``group``.
        """
        if current_node().config is None:
            return _reference(self._state.procs, self._region, None)
        return device_mesh_of(self._state.procs, self._region)


def _reference(procs: Procs, region: Region, axes: tuple[str, ...] | None) -> GroupReference:
    if procs.proc(0) == current_node().proc:
        raise GroupError(PROGRAM)
    return GroupReference(procs, region, axes)


class GroupReference:
    """A program's reference to a process group, or to a DeviceMesh if ``axes`` is None; resolved on a rank."""

    def __init__(self, procs: Procs, region: Region, axes: tuple[str, ...] | None) -> None:
        self._procs, self._region, self._axes = procs, region, axes

    def __reduce__(self) -> tuple[Any, ...]:
        if self._axes is None:
            return device_mesh_of, (self._procs, self._region)
        return group_of, (self._procs, self._region, self._axes)

    def __repr__(self) -> str:
        what = "DeviceMesh" if self._axes is None else "process group"
        return f"<{what} of {self._procs.name}, to be sent to its ranks>"


def group_of(procs: Procs, region: Region, axes: tuple[str, ...]) -> Any:
    """Return this rank's process group along some axes of a view; without axes, over the whole view."""
    world, rank = _world_of(procs, region)
    groups = [world.group(ranks) for ranks in _groups_of(region, rank)]
    if not axes:
        return groups[0]
    if len(axes) == 1:
        return groups[1 + region.extent.labels.index(axes[0])]
    return world.group(_along(region, rank, axes))


def groups_of(procs: Procs, region: Region, purpose: str, check: Callable[[World], None]) -> tuple[World, list[Any]]:
    """Return this rank's private groups in a view for one purpose: over all of it, then along each axis.

    Args:
        procs: the mesh.
        region: the view.
        purpose: names it; the same on all ranks.
        check: raises if the others do not make them; called with the default group once it is there.
    """
    world, rank = _world_of(procs, region)
    check(world)
    return world, [world.group_apart(ranks, purpose) for ranks in _groups_of(region, rank)]


def device_mesh_of(procs: Procs, region: Region) -> Any:
    """Return the DeviceMesh of a view of this rank's mesh."""
    from monarch._tensors.collectives.device_mesh import make_device_mesh

    world, rank = _world_of(procs, region)
    groups = [world.group(ranks) for ranks in _groups_of(region, rank)]
    labels, sizes = region.extent.labels or ("ranks",), region.extent.sizes or (1,)
    return make_device_mesh(world, groups[1:] or groups, list(region.base_ranks()), sizes, labels)


def _world_of(procs: Procs, region: Region) -> tuple[World, int]:
    node = current_node()
    config = node.config
    if config is None or config.procs != procs or region.position_of(node.rank) is None:
        raise GroupError(f"this process is not a rank of {procs.name}, or not in this slice of it", mesh=procs.name)
    _check_doom(procs, region)
    world = ensure_world()
    # Its spawn may have failed meanwhile.
    _check_doom(procs, region)
    return world, node.rank


def _check_doom(procs: Procs, region: Region) -> None:
    """Raise if this code is a constructor whose collectives some ranks of a view will not join."""
    here = current.get()
    doomed = local_rendezvous().calls.doomed(here[1].src, here[1].port, region.base_ranks()) if here is not None else ""
    if doomed:
        raise GroupError(doomed, mesh=procs.name)


def _groups_of(region: Region, rank: int) -> list[list[int]]:
    """Return a rank's groups in a view, in the order in which all ranks make them: the whole view, then each axis."""
    return [list(region.base_ranks()), *(_along(region, rank, (label,)) for label in region.extent.labels)]


def _along(region: Region, rank: int, axes: tuple[str, ...]) -> list[int]:
    position = region.position_of(rank)
    assert position is not None
    here = region.extent.point(position)
    for axis in axes:
        if axis not in region.extent:
            raise AxisError(f"no axis {axis!r}")
    return list(region.slice(**{label: here[label] for label in region.extent if label not in axes}).base_ranks())
