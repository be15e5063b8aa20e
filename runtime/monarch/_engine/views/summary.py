"""Memory and failures of tensors for notebooks. Imports torch only if the program has distributed tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from monarch._node.current import current_node

_MOST = 8
"""Sentences about failures at a time."""


class HeldRow(NamedTuple):
    """The tensors of one name on one mesh.

    Attributes:
        mesh: its name.
        name: that the program has for the tensors.
        tensors: their number.
        size: bytes of the whole tensors.
        most: bytes on the rank that holds most of them.
    """

    mesh: str
    name: str
    tensors: int
    size: int
    most: int


def tensors_held(names: Mapping[str, Any]) -> list[HeldRow]:
    """Return the memory that distributed tensors hold; asks no rank.

    Args:
        names: variables of the program.
    """
    if "monarch._engine.meshes.tensor_mesh" not in sys.modules:
        return []
    from monarch._engine.meshes.tensor_mesh import TensorMeshes
    from monarch._engine.views.memory import held_by_name

    meshes = current_node().part(TensorMeshes).known.values()
    return [HeldRow(repr(mesh.procs.name), *held) for mesh in list(meshes) for held in held_by_name(mesh, names)]


def failed_tensors(names: Mapping[str, Any]) -> list[str]:
    """Return sentences about tensors that have failed and that no look has raised; each only once.

    Args:
        names: variables of the program.
    """
    if "monarch._engine.meshes.tensor_mesh" not in sys.modules:
        return []
    from monarch._engine.issuing.failures import describe_unreported
    from monarch._engine.meshes.tensor_mesh import TensorMeshes
    from monarch._engine.views.memory import named_numbers

    found = current_node().part(TensorMeshes).take_unreported()
    if not found:
        return []
    known = named_numbers(names)
    texts = [describe_unreported(each, known) for each in found[:_MOST]]
    if len(found) > _MOST:
        texts.append(f"{len(found) - _MOST} more ops on tensors failed or were cancelled")
    return texts
