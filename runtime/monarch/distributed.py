"""torch process groups for code in endpoints, over the mesh that the running actor was spawned on.

    from monarch.distributed import device_mesh, group

    class Trainer(Actor):
        @endpoint
        def setup(self):
            self.model = DistributedDataParallel(Net(), process_group=group())

Both create the groups on first use. Meshes have methods of the same names, for other meshes and slices.

``copy_state`` copies tensors between actors of two meshes, whatever their sizes and layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._meshes.context import context

if TYPE_CHECKING:
    from monarch._engine.mesh import Mesh
    from monarch._state.copy.copying import CopyReport, copy_state
    from monarch._tensors.checkpoints.states import Part

__all__ = ["CopyReport", "Mesh", "Part", "copy_state", "device_mesh", "group"]


def group(*axes: str) -> Any:
    """Return the process group of this actor's mesh; see ``ProcMesh.group``.

    Args:
        axes: the axes along which the ranks of the group differ; none for all of the mesh.

    Raises:
        AxisError: the mesh has no axis of this name.
        GroupError: this process is not a rank, or a rank has died or does not join.
    """
    return context().actor_instance.proc_mesh.group(*axes)


def device_mesh() -> Any:
    """Return a torch ``DeviceMesh`` with the axes of this actor's mesh; see ``ProcMesh.device_mesh``.

    Raises:
        GroupError: this process is not a rank, or a rank has died or does not join.
    """
    return context().actor_instance.proc_mesh.device_mesh()


def __getattr__(name: str) -> Any:
    # Imported on first use, since they need torch.
    if name == "Part":
        from monarch._tensors.checkpoints.states import Part as found
    elif name == "Mesh":
        from monarch._engine.mesh import Mesh as found
    elif name in ("CopyReport", "copy_state"):
        from monarch._state.copy import copying

        found = getattr(copying, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
