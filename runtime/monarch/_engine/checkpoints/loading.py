"""``load``: distributed tensors from disk, in place or new ones, each rank its shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from monarch._core.kinds import is_a
from monarch._engine.checkpoints.states import by_mesh, check_real, parts_in, states_of
from monarch._engine.layouts.specs import replicated
from monarch._engine.making import made_with_placements
from monarch._engine.meshes.tensor_mesh import TensorMesh, tensor_mesh_of
from monarch._engine.rank.operations.checkpoints import LOAD, Contents, TensorToRead
from monarch._engine.tensors.copied_views import write_back
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.training.plans import check_patterns, placements_for, split_plan
from monarch._engine.values.fetching import has_boxes
from monarch._state.checkpoint.api import folder_of
from monarch.exceptions import ArgumentError


def load(
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    mesh: Any = None,
    plan: Any = "replicate",
    version: str | int | None = None,
) -> Any:
    """Read a checkpoint into the tensors of a state, or as new distributed tensors. Mesh sizes and specs may
    differ from those that it was written with.

    Args:
        path: a folder of ``monarch.save`` or ``monarch.checkpoint``, a version in one, or a folder of
            ``torch.distributed.checkpoint``; visible to all hosts of the mesh.
        state: a dict as for ``monarch.save``. Its tensors are read in place, other values are replaced, and objects are
            restored by ``load_state_dict``; only its keys are read. An optimizer without a state gets one, and one
            that had none when it was saved loses its own. Tensors whose values were lost with a rank, or by an op that
            failed, have values again.
        mesh: for new tensors: a Mesh, or a mesh of processes or a slice of one.
        plan: the plan of new tensors: ``"replicate"``, ``"shard"``, ``"auto"``, or specs by pattern of their names,
            such as ``{"model.*.weight": ["dp", None]}``; see ``monarch.module_to_mesh``.
        version: the name or the number of a version; None for the latest.

    Returns:
        The state; without one, a dict as it was saved. There, lists with tensors are dicts by index.

    Raises:
        ArgumentError: there is no checkpoint or version; it has no such key, or another shape; a spec does not fit.
        TensorError: a rank could not read its shards; the tensors have no values then.
        DeviceMeshError: a rank has died.
    """
    where = folder_of(path)
    if (state is None) == (mesh is None):
        raise ArgumentError("load: expected either a state to read into, or mesh= for new tensors")
    if mesh is not None:
        return _load_new(where, tensor_mesh_of(mesh), plan, version)
    if not is_a(plan, str) or plan != "replicate":
        raise ArgumentError("load: plan= applies only to new tensors, with mesh=; tensors of a state keep their specs")
    return _load_into(where, state, version)


def _load_new(path: str, mesh: TensorMesh, plan: Any, version: str | int | None) -> dict[Any, Any]:
    check_real([mesh], "load")
    specs, styles = split_plan(plan)
    if styles:
        raise ArgumentError("load: plan= takes specs by name pattern, not parallel styles")
    contents = _contents(mesh, path, version)
    known = {key: each for key, each in contents.tensors.items() if each is not None}
    check_patterns(specs, list(known), "tensor of the checkpoint")
    placed = {
        key: placements_for(specs or "replicate", mesh, key, torch.empty(shape, device="meta"))[0]
        for key, (shape, _) in known.items()
    }
    made = [mesh.make(mesh.layouts.dense(shape, dtype, placed[key])) for key, (shape, dtype) in known.items()]
    _read(mesh, contents.folder, list(known), made)
    others = [key for key in contents.tensors if key not in known]
    values = {**dict(zip(known, made, strict=True)), **_values(mesh, contents.folder, others)}
    _sync(mesh, made)
    result: dict[Any, Any] = {}
    for key in contents.tensors:
        *outer, last = contents.paths[key]
        inner = result
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[last] = values[key]
    return result


def _load_into(path: str, state: Any, version: str | int | None) -> Any:
    from monarch._tensors.checkpoints.files import is_stateful
    from monarch._tensors.checkpoints.restores import check_keys, put

    tensors, parts, leaves = _tensors_in(state)
    meshes = by_mesh(tensors)
    check_real([mesh for mesh, _ in meshes.values()], "load")
    first = next(iter(meshes.values()))[0]
    contents = _contents(first, path, version)
    unused = _unused(state, contents)
    if _make_room(state, contents) or unused:
        tensors, parts, leaves = _tensors_in(state, unused)
        meshes = by_mesh(tensors)
    sizes = {key: torch.Size(each[0]) if each is not None else None for key, each in contents.tensors.items()}
    check_keys(contents.folder, sizes, {key: value for key, (_, value) in leaves.items()})
    names = [key for key, (_, value) in leaves.items() if isinstance(value, Tensor)]
    for key in names:
        if sizes[key] is None:
            raise ArgumentError(f"{key!r} is a tensor in the state, but not in the checkpoint {contents.folder}")
    for mesh, indices in meshes.values():
        _read(mesh, contents.folder, [names[index] for index in indices], [tensors[index] for index in indices])
    others = [key for key, (_, value) in leaves.items() if not isinstance(value, Tensor)]
    for key, value in _values(first, contents.folder, others).items():
        where, held = leaves[key]
        if isinstance(held, torch.Tensor):
            with torch.no_grad():
                held.copy_(value)
        else:
            put(parts, where, value)
    for mesh, indices in meshes.values():
        _sync(mesh, [tensors[index] for index in indices])
    for key, value in state.items():
        if is_stateful(value):
            value.load_state_dict(parts[key])
        else:
            state[key] = parts[key]
    return state


def _tensors_in(
    state: Any, unused: Sequence[Any] = ()
) -> tuple[list[Tensor], dict[Any, Any], dict[str, tuple[Any, Any]]]:
    parts = states_of(state, "load")
    for key in unused:
        parts[key] = {**parts[key], "state": {}}
    leaves = parts_in(parts, "load")
    return [value for _, value in leaves.values() if isinstance(value, Tensor)], parts, leaves


def _unused(state: Any, contents: Contents) -> list[Any]:
    """Return the optimizers, by key, that had taken no step when they were saved, and have taken some since."""
    from monarch._tensors.checkpoints.optimizers import is_optimizer

    return [
        key
        for key, value in state.items()
        if is_optimizer(value)
        and value.state
        and any(name.startswith(f"{key}.param_groups.") for name in contents.tensors)
        and not any(name.startswith(f"{key}.state.") for name in contents.tensors)
    ]


def _make_room(state: Any, contents: Contents) -> bool:
    """Let optimizers without a state make one, if the checkpoint has it; return whether there were any."""
    from monarch._tensors.checkpoints.optimizers import is_optimizer, make_room

    found = False
    for key, value in state.items():
        if (
            is_optimizer(value)
            and not value.state
            and any(name.startswith(f"{key}.state.") for name in contents.tensors)
        ):
            parameters = [each for group in value.param_groups for each in group["params"]]
            grads = [each.grad for each in parameters]
            for each in parameters:
                each.grad = None
            try:
                make_room(value)
            finally:
                for each, grad in zip(parameters, grads, strict=True):
                    each.grad = grad
            found = True
    return found


def _contents(mesh: TensorMesh, path: str, version: str | int | None) -> Contents:
    (found,) = mesh.recovery.ask(lambda: mesh.first.contents.call(path, version).get()).values()
    if is_a(found.value, str):
        raise ArgumentError(found.value)
    return found.value


def _values(mesh: TensorMesh, folder: str, keys: list[str]) -> dict[str, Any]:
    """Return values for the program, read by the first rank."""
    if not keys:
        return {}
    (found,) = mesh.recovery.ask(lambda: mesh.first.read_values.call(folder, keys).get()).values()
    # Copies, since the memory of a message is shared.
    return {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in found.value.items()}


def _read(mesh: TensorMesh, folder: str, keys: list[str], tensors: list[Tensor]) -> None:
    """Issue the op that reads some distributed tensors; those that are sharded in an unusual way are copied."""
    # All ranks must agree on what has failed before: the op gives values to all.
    mesh.recovery.ask(lambda: mesh.actors.ready.call([]).get())
    targets = [each if has_boxes(each) else _substitute(each) for each in tensors]
    wanted = [_wanted(key, each) for key, each in zip(keys, targets, strict=True)]
    mesh.issue(LOAD, (), (), (folder, wanted), tuple(targets))
    with torch.no_grad():
        for tensor, target in zip(tensors, targets, strict=True):
            if target is not tensor:
                tensor.copy_(target)
            else:
                write_back(tensor)


def _substitute(tensor: Tensor) -> Tensor:
    layout = tensor.monarch_layout
    return made_with_placements(
        layout.mesh, "empty", tuple(layout.shape), layout.dtype, replicated(layout.placements), ()
    )


def _wanted(key: str, tensor: Tensor) -> TensorToRead:
    layout = tensor.monarch_layout
    return TensorToRead(key, tuple(layout.shape), layout.stride, layout.dtype, tuple(layout.placements))


def _sync(mesh: TensorMesh, tensors: list[Tensor]) -> None:
    """Wait until the ranks have read; raise what has failed."""
    numbers = [each.monarch_ref.number for each in tensors]
    mesh.recovery.ask(lambda: mesh.actors.ready.call(numbers).get())
