"""Memory that the tensors of a program hold on the ranks, by the names that the program has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.fetching import shard_of

_OTHER = "(no name)"


class NamedTensors(NamedTuple):
    """The tensors of one name.

    Attributes:
        name: the name of a variable or a module; ``(no name)`` for all others, such as gradients and states of
            optimizers.
        tensors: their number.
        size: bytes of the whole tensors.
        most: bytes on the rank that holds most of them.
    """

    name: str
    tensors: int
    size: int
    most: int


def held_by_name(mesh: TensorMesh, names: Mapping[str, Any]) -> list[NamedTensors]:
    """Return the memory that distributed tensors hold, the most first; asks no rank.

    Args:
        mesh: the mesh of the tensors.
        names: variables of the program.
    """
    owners = named_numbers(names)
    groups: dict[str, list[Any]] = {}
    for number, layout in mesh.stream.tensors():
        groups.setdefault(owners.get(number, _OTHER), []).append(layout)
    found = [
        NamedTensors(name, len(layouts), sum(each.size_in_bytes for each in layouts), _most(mesh, layouts))
        for name, layouts in groups.items()
    ]
    return sorted(found, key=lambda each: -each.most)


def named_numbers(names: Mapping[str, Any]) -> dict[int, str]:
    """Return names of the program by reference of their tensors."""
    owners: dict[int, str] = {}
    for name, value in list(names.items()):
        if not name.startswith("_"):
            for tensor in _tensors_in(value):
                owners.setdefault(tensor.monarch_ref.number, name)
    return owners


def _tensors_in(value: Any) -> list[Any]:
    if isinstance(value, RankTensor) and value.dropped:
        return []
    if isinstance(value, Tensor | RankTensor):
        return [value, *([value.grad] if value.is_leaf and isinstance(value.grad, Tensor | RankTensor) else [])]
    if isinstance(value, nn.Module):
        found = [*value.parameters(), *value.buffers()]
        return [each for tensor in found for each in _tensors_in(tensor)]
    if isinstance(value, list | tuple):
        # A container of anything.
        return [each for each in value if isinstance(each, Tensor | RankTensor)]  # pyright: ignore[reportUnknownVariableType]
    return []


def _most(mesh: TensorMesh, layouts: list[Any]) -> int:
    most = 0
    for rank in mesh.ranks:
        total = 0
        for layout in layouts:
            if layout.is_local:
                total += layout.size_in_bytes
                continue
            count = layout.dtype.itemsize
            for size in shard_of(mesh, layout.shape, layout.placements, rank)[0]:
                count *= size
            total += count
        most = max(most, total)
    return most
