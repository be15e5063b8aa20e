"""Process groups in torch's own terms, for the code of endpoints: of the mesh that the running actor was spawned on.

    from monarch.distributed import device_mesh, group

    class Trainer(Actor):
        @endpoint
        def setup(self):
            self.model = DistributedDataParallel(Net(), process_group=group())

Both make the groups when they are first used. Meshes have methods of the same names, for other meshes and slices.
"""

from __future__ import annotations

from typing import Any

from monarch._actors.context import context

__all__ = ["device_mesh", "group"]


def group(*axes: str) -> Any:
    """The process group of this actor's mesh; see ``ProcMesh.group``.

    Args:
        axes: the axes along which the ranks of the group differ; none for all of the mesh.

    Raises:
        AxisError: there is no such axis.
        GroupError: this is no rank, or a rank has died or does not join.
    """
    return context().actor_instance.proc_mesh.group(*axes)


def device_mesh() -> Any:
    """A torch ``DeviceMesh`` with the axes of this actor's mesh; see ``ProcMesh.device_mesh``.

    Raises:
        GroupError: this is no rank, or a rank has died or does not join.
    """
    return context().actor_instance.proc_mesh.device_mesh()
