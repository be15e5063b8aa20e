"""A rank that replaces a dead one gets the tensors that other ranks hold too, and the ops that wait."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from monarch._core.shapes.region import Region
from monarch._engine.issuing.encoding import CALL, NEW
from monarch._engine.issuing.failures import OpFailure

_AT_ONCE = 32
"""Tensors in one message between ranks."""
_WAIT_S = 600.0
"""Seconds to wait for a message of tensors."""


class RestoresTensors(Protocol):
    """The executor of a rank, which is above this file."""

    values: dict[int, Any]
    failed: dict[int, OpFailure]
    kept: list[tuple[Region, Any]]


class Account(NamedTuple):
    """The state of a halted rank.

    Attributes:
        held: references of its tensors.
        kept: the entries that wait, with the mesh or slice of each.
        failed: why tensors have no value, by reference.
    """

    held: set[int]
    kept: list[tuple[Region, Any]]
    failed: dict[int, OpFailure]


class Restored(NamedTuple):
    """A tensor for a new rank.

    Attributes:
        number: its reference.
        region: its mesh or slice.
        shape: the shape of the whole tensor.
        stride: likewise.
        placements: the placements of the whole tensor.
    """

    number: int
    region: Region
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Any, ...]


def is_op(entry: Any) -> bool:
    """Return whether an entry is an op, which all ranks of its mesh get in the same order."""
    return not isinstance(entry, int) and entry[0] not in (NEW, "put", CALL)


def is_put(entry: Any) -> bool:
    """Return whether an entry is a shard of a tensor that the program has sent."""
    return not isinstance(entry, int) and entry[0] == "put"


def called(kept: list[tuple[Region, Any]]) -> set[int]:
    """Return the numbers of the functions that wait on a rank."""
    return {entry[1] for _, entry in kept if not isinstance(entry, int) and entry[0] == CALL}


def account(executor: RestoresTensors) -> Account:
    """Return the state of a rank."""
    return Account(set(executor.values), list(executor.kept), dict(executor.failed))


def fetched(sources: list[tuple[Any, list[Restored]]]) -> dict[int, tuple[Restored, torch.Tensor]]:
    """Return the shards that other ranks have of tensors."""
    found: dict[int, tuple[Restored, torch.Tensor]] = {}
    for view, wanted in sources:
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            (shards,) = view.give.call([each.number for each in some]).get(_WAIT_S).values()
            # Copies, since the memory of a message is shared.
            found.update({each.number: (each, shard.clone()) for each, shard in zip(some, shards, strict=True)})
    return found


def wrapped(restored: Restored, shard: torch.Tensor, mesh: Any) -> DTensor:
    """Return the tensor of a shard."""
    local = torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device=mesh.device_type).copy_(shard)
    return DTensor.from_local(
        local,
        mesh,
        restored.placements,
        run_check=False,
        shape=torch.Size(restored.shape),
        stride=restored.stride,
    )
