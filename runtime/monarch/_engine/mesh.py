"""``Mesh``: the devices that a program computes on, with a shape and names for its axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from monarch._core.kinds import is_a
from monarch._engine.meshes.tensor_mesh import tensor_mesh_of
from monarch._engine.simulation.current import current
from monarch._meshes.host_mesh import this_host
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._procs.os.gpus import visible_gpus
from monarch.exceptions import ArgumentError, AxisError


class Mesh:
    """Ranks with a shape: a process for each, on this host, or those of a mesh of processes.

    Args:
        shape: sizes of the axes; None for one axis of the GPUs of this host.
        mesh_dim_names: names of the axes.
        procs: existing processes to use, with their axes, instead of new ones.

    Raises:
        ArgumentError: the names do not fit the shape, or there is no shape and no GPU.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        procs: ProcMesh | None = None,
    ) -> None:
        if procs is not None:
            if not hasattr(procs, "extent"):
                raise ArgumentError(
                    f"procs: expected a mesh of processes such as this_host().spawn_procs(...), got {procs!r}"
                )
            self.procs: ProcMesh = procs
            return
        sizes = _sizes(shape)
        names = tuple(mesh_dim_names) if mesh_dim_names is not None else _names(len(sizes))
        if len(names) != len(sizes):
            raise ArgumentError(f"mesh_dim_names: expected {len(sizes)} names for shape {sizes}, got {names}")
        if len(set(names)) != len(names):
            raise ArgumentError(f"mesh_dim_names: expected distinct names, got {names}")
        if current.simulation is not None:
            self.procs = current.simulation.procs(names, sizes)
            return
        self.procs = this_host().spawn_procs(dict(zip(names, sizes, strict=True)), name="mesh")

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.procs.extent.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.procs.extent.sizes)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks, in all or along an axis.

        Raises:
            AxisError: the mesh has no axis of this name.
        """
        if isinstance(axis, int):
            if not -self.ndim <= axis < self.ndim:
                raise AxisError(f"no axis {axis}; this mesh has {self.ndim}: {', '.join(self.mesh_dim_names)}")
            return self.shape[axis]
        return self.procs.size(axis)

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on each rank and return the results as a ValueMesh.

        Args:
            function: from a module, a script or a notebook cell, or a lambda.
            args: the same for every rank; a distributed tensor of this mesh arrives as the shard of the rank.
            kwargs: likewise.

        Raises:
            ActorError: the function raised.
            DeviceMeshError: a rank has died, or the mesh was stopped.
        """
        from monarch._engine.calling import execute

        return execute(tensor_mesh_of(self), function, args, kwargs)

    def activate(self) -> AbstractContextManager[Any]:
        """Let torch's functions in a block make rank-local tensors: see ``ProcMesh.activate``."""
        return _active().activate(self)

    def rank_tensor(self, dim: str) -> Any:
        """Return the coordinate of each rank along an axis, as a rank-local tensor."""
        return _active().rank_tensor(self, dim)

    def rank_tensors(self) -> dict[str, Any]:
        """Return the coordinates of each rank as rank-local tensors, by axis."""
        return _active().rank_tensor(self, None)

    def split(self, /, **axes: Any) -> Mesh:
        """Return the same ranks with an axis split into several, as in ``mesh.split(gpus=("dp", "tp"), tp=2)``.

        Raises:
            ShapeError: the sizes do not fit.
        """
        return Mesh(procs=self.procs.split(**axes))

    def flatten(self, name: str) -> Mesh:
        """Return the same ranks along one axis."""
        return Mesh(procs=self.procs.flatten(name))

    def rename(self, /, **axes: str) -> Mesh:
        """Return the same ranks with other names of axes, as in ``mesh.rename(gpus="dp")``."""
        return Mesh(procs=self.procs.rename(**axes))

    def slice(self, **coordinates: Any) -> Mesh:
        """Return a part of the mesh: an int fixes an axis and drops it, a slice keeps a range of it."""
        return Mesh(procs=self.procs.slice(**coordinates))

    def stop(self) -> Any:
        """End the processes; the returned future is done when they have ended."""
        return self.procs.stop()

    def __len__(self) -> int:
        return len(self.procs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.procs == other.procs

    def __hash__(self) -> int:
        return hash(self.procs)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"Mesh({axes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.procs,)


def _active() -> Any:
    from monarch._engine import active

    return active


def _rebuilt(procs: ProcMesh) -> Mesh:
    return Mesh(procs=procs)


def _sizes(shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None:
        gpus = len(visible_gpus())
        if not gpus:
            raise ArgumentError("Mesh: this host has no GPU; give a shape, as in Mesh(shape=(2, 2)), to use CPUs")
        return (gpus,)
    given: Any = shape
    sizes: tuple[int, ...] = (given,) if is_a(given, int) else tuple(given)
    if not sizes or not all(is_a(size, int) and size > 0 for size in sizes):
        raise ArgumentError(f"shape: expected positive sizes, got {shape!r}")
    return sizes


def _names(count: int) -> tuple[str, ...]:
    return ("gpus",) if count == 1 else tuple(f"axis{number}" for number in range(count))
