"""DeviceMeshes on a rank, over process groups of the engine: its collectives never meet those of the user's code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch._actors.running import current
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import forget_shardings, set_apart
from monarch._engine.rank.devices.on_device import register_gpu_attention
from monarch._engine.rank.recovery.renewing import attempts
from monarch._groups.groups import groups_of
from monarch._groups.rendezvous import local_rendezvous
from monarch._meshes.context import view_of
from monarch._node.current import current_node
from monarch._tensors.collectives.device_mesh import make_device_mesh
from monarch.exceptions import GroupError

if TYPE_CHECKING:
    from monarch._tensors.collectives.world import World

_PURPOSE = "tensors"
_REPLACED = "the process group was replaced while the groups for tensors were being created"


def region_of_view() -> Region:
    """Return the mesh or slice to which the running message was sent."""
    here = current.get()
    assert here is not None
    return view_of(*here)


def is_unregistered(error: BaseException) -> bool:
    """Return whether a collective met process groups that have ended, since other ranks began new ones."""
    return isinstance(error, RuntimeError) and "Could not resolve the process group" in str(error)


class RankMeshes:
    """The DeviceMeshes of this rank, by mesh or slice; made on first use by all ranks of it."""

    def __init__(self) -> None:
        self._meshes: dict[Region, DeviceMesh] = {}
        self.generation = 0
        """That of the process groups of the newest mesh: later ones may begin while ops still use these."""

    def of(self, region: Region) -> DeviceMesh:
        """Return the DeviceMesh of a mesh or slice."""
        found = self._meshes.get(region)
        if found is None:
            found = self._meshes[region] = self._made(region)
        return found

    def regions(self) -> list[Region]:
        """Return the meshes and slices that have a DeviceMesh."""
        return list(self._meshes)

    def works(self) -> bool:
        """Return whether the process groups of the newest mesh have their connections."""
        return not self.generation or local_rendezvous().works(self.generation)

    def device(self) -> str:
        """Return the type of the device of this rank; makes the process groups."""
        return self.of(region_of_view()).device_type

    @property
    def device_type(self) -> str:
        """Return the type of the device of this rank, which has process groups."""
        return next(iter(self._meshes.values())).device_type

    def renew(self, values: dict[int, Any], regions: list[Region] | None) -> None:
        """Make new process groups, and move all tensors to meshes over them.

        Raises whatever breaks the groups while they are made; then nothing has changed.

        Args:
            values: tensors by reference.
            regions: meshes and slices that need groups, in the same order on all ranks; None for the known ones.
        """
        old, self._meshes = self._meshes, {}
        forget_shardings()
        rank = current_node().rank
        try:
            for region in regions or ():
                if region.position_of(rank) is not None:
                    self.of(region)
            by_mesh = {id(mesh): self.of(region) for region, mesh in old.items()}
        except BaseException:
            # Tensors are found by the old ones when this is called again.
            self._meshes = old
            raise
        for number, tensor in values.items():
            mesh = by_mesh.get(id(tensor.device_mesh)) if isinstance(tensor, DTensor) else None
            if mesh is not None:
                values[number] = DTensor.from_local(
                    tensor.to_local(),
                    mesh,
                    tensor.placements,
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )

    def _check(self, world: World) -> None:
        """Raise GroupError if the other ranks do not make groups of a mesh or slice in a generation.

        All meshes of a rank have theirs in one generation, on which all ranks have agreed. In a later one, a rank that
        has not halted yet would wait for others that have.
        """
        attempts.check()
        number = local_rendezvous().number_of(world)
        if not number or (self._meshes and number != self.generation):
            raise GroupError(_REPLACED)
        self.generation = number

    def _made(self, region: Region) -> DeviceMesh:
        config = current_node().config
        assert config is not None
        world, groups = groups_of(config.procs, region, _PURPOSE, self._check)
        labels, sizes = region.extent.labels or ("ranks",), region.extent.sizes or (1,)
        try:
            mesh = make_device_mesh(world, groups[1:] or groups, list(region.base_ranks()), sizes, labels)
        except Exception as error:
            if self.works():
                raise
            # They have been destroyed for those of the next generation.
            raise GroupError(_REPLACED) from error
        # The code of the user may have one of these ranks, with other process groups.
        set_apart(mesh, self.generation)
        if mesh.device_type == "cuda":
            torch.cuda.set_device(torch.cuda.current_device())
            register_gpu_attention()
        return mesh
