"""States with distributed tensors in them: nested dicts, and objects with a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from monarch._core.kinds import is_list, is_mapping
from monarch._engine.dtensor_compat import tree_leaves
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._meshes.inside import state_of
from monarch.exceptions import ArgumentError

Path = tuple[Any, ...]
"""Keys of dicts and indices of lists, outermost first."""


def parts_in(state: Any, what: str) -> dict[str, tuple[Path, Any]]:
    """Return the parts of a state, whose objects have become dicts, by their names in a checkpoint.

    Raises:
        ArgumentError: two parts have the same name, or one hides tensors.
    """
    from monarch._tensors.checkpoints.files import leaves_of

    found: dict[str, tuple[Path, Any]] = {}
    for name, (path, value) in leaves_of(state):
        if name in found:
            raise ArgumentError(f"{what}: two values have the name {name!r}; use different keys")
        if isinstance(value, RankTensor):
            raise ArgumentError(
                f"{what}: {name!r} is a rank-local tensor, which has a different value on each rank; use one that is "
                f"sharded over the mesh, as monarch.from_local(tensor, mesh, spec) returns"
            )
        if not isinstance(value, Tensor) and any(isinstance(each, Tensor) for each in _inside(value)):
            raise ArgumentError(
                f"{what}: {name!r}, of type {type(value).__name__}, contains distributed tensors; use a dict or a list"
            )
        found[name] = path, value
    return found


def _inside(value: Any) -> Iterator[Any]:
    return iter(tree_leaves(value)) if isinstance(value, tuple | list) else iter(())


def states_of(state: Any, what: str) -> dict[Any, Any]:
    """Return a state with the objects at its top replaced by their states.

    Raises:
        ArgumentError: it is not a dict.
    """
    from monarch._tensors.checkpoints.files import states_in

    if not is_mapping(state):
        raise ArgumentError(
            f'{what}: expected a dict such as {{"model": model, "optimizer": optimizer}}, got {type(state).__name__}'
        )
    return states_in(state)


def as_dicts(state: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a state as dicts, lists with tensors included, with its parts converted."""
    from monarch._tensors.checkpoints.files import has_parts

    if is_mapping(state):
        return {key: as_dicts(value, convert) for key, value in state.items()}
    if is_list(state) and has_parts(state):
        return {key: as_dicts(value, convert) for key, value in enumerate(state)}
    return convert(state)


def by_mesh(tensors: list[Tensor]) -> dict[int, tuple[TensorMesh, list[int]]]:
    """Return the meshes of tensors, each with the indices of its tensors."""
    found: dict[int, tuple[TensorMesh, list[int]]] = {}
    for index, tensor in enumerate(tensors):
        mesh: TensorMesh = tensor.monarch_layout.mesh
        found.setdefault(id(mesh), (mesh, []))[1].append(index)
    return found


def check_real(meshes: list[TensorMesh], what: str) -> None:
    """Raise for tensors that no common mesh of processes has.

    Raises:
        ArgumentError: there are none, they are simulated, or some are on other processes.
    """
    if not meshes:
        raise ArgumentError(f"{what}: the state has no distributed tensors; use torch.{what}")
    for mesh in meshes:
        if mesh.actors is None:
            raise ArgumentError(f"{what}: a simulated mesh has no values; leave checkpoints out of a simulation")
    if len({state_of(mesh.procs).procs.uid for mesh in meshes}) > 1:
        raise ArgumentError(
            f"{what}: the tensors are on different process meshes, {', '.join(map(repr, meshes))}; save each "
            f"mesh to a path of its own"
        )
