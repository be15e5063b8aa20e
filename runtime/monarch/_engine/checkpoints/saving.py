"""``save``: a state with distributed tensors on disk, written by the ranks, each its shards."""

from __future__ import annotations

import os
from typing import Any

import torch

from monarch._core.kinds import is_a, is_count
from monarch._engine.checkpoints.states import as_dicts, by_mesh, check_real, parts_in, states_of
from monarch._engine.issuing.shard_refs import ShardRef
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.fetching import in_boxes
from monarch._node.future import Future
from monarch._state.checkpoint.api import Save, folder_of
from monarch.exceptions import ArgumentError

_TAKE = "tensor_parts.take"


def save(state: Any, path: str | os.PathLike[str], *, keep: int = 2, timeout: float = 600.0) -> str:
    """Write a state with distributed tensors as a new version in a folder, and return the path of the version.

    The ranks write their shards, in the format of ``torch.distributed.checkpoint``, which also reads it. A version is
    complete or absent: if something dies meanwhile, earlier versions are unchanged.

    Args:
        state: a dict of distributed tensors, other tensors, values that can be pickled, dicts of them, and objects with
            ``state_dict`` and ``load_state_dict``, such as ``{"model": model, "optimizer": optimizer}``.
        path: the folder, visible to all hosts of the mesh; created if missing.
        keep: how many versions stay in the folder.
        timeout: seconds in total.

    Raises:
        ArgumentError: the state has no distributed tensors, or is not a dict.
        ActorError: a value cannot be saved, or the disk is full.
        CallTimeoutError: it took longer than the timeout.
        DeviceMeshError: a rank has died, a tensor has no value, or another program writes there.
    """
    return async_save(state, path, keep=keep, timeout=timeout).get()


def async_save(state: Any, path: str | os.PathLike[str], *, keep: int = 2, timeout: float = 600.0) -> Future[str]:
    """Copy a state into CPU memory of the ranks and write it while the program continues; see ``save``.

    Returns:
        A future of the path of the version.

    Raises:
        ArgumentError: see ``save``; the future raises what is found later.
    """
    if not is_count(keep, 1):
        raise ArgumentError(f"keep: expected an int of at least 1, got {keep!r}")
    if not (is_a(timeout, int, float) and timeout > 0):
        raise ArgumentError(f"timeout: expected seconds above 0, got {timeout!r}")
    parts = states_of(state, "save")
    leaves = parts_in(parts, "save")
    tensors = [value for _, value in leaves.values() if isinstance(value, Tensor)]
    meshes = by_mesh(tensors)
    check_real([mesh for mesh, _ in meshes.values()], "save")
    kept: list[Any] = []
    """Tensors that exist for this only, until the ranks have copied them."""
    for mesh, indices in meshes.values():
        _check_values(mesh, [tensors[index] for index in indices])

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            with torch.no_grad():
                kept.append(in_boxes(value))
            return ShardRef(kept[-1].monarch_ref.number)
        return value.detach() if isinstance(value, torch.Tensor) else value

    packed = as_dicts(parts, part)
    mesh = next(iter(meshes.values()))[0]
    for each, _ in meshes.values():
        each.stream.flush()
    whole = mesh.recovery.whole
    has_values = len(tensors) < len(leaves)
    saving = Save(whole, folder_of(path), _TAKE, (packed, has_values, mesh.ranks[0]), keep, timeout)
    saving.wait_for_copies()
    return saving.future


def _check_values(mesh: TensorMesh, tensors: list[Tensor]) -> None:
    """Wait for earlier ops; raise for a tensor without a value, with the line of the op that failed."""
    numbers = [each.monarch_ref.number for each in tensors]
    mesh.recovery.ask(lambda: mesh.actors.ready.call(numbers).get())
