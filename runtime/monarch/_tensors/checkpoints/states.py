"""States of models: named tensors, each whole or a shard of one that several ranks hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from monarch._core.kinds import is_mapping
from monarch._core.shapes.boxes import Box, box_of, elements
from monarch._tensors.torch_compat import local_box
from monarch.exceptions import ArgumentError


class Part:
    """A shard of a larger tensor, whose other shards are on other ranks.

    Args:
        tensor: the shard, contiguous.
        offset: indices of its first element in the whole tensor, one for each dim.

    Raises:
        ArgumentError: the number of indices differs from that of dims, or one is negative.
    """

    def __init__(self, tensor: torch.Tensor, offset: Sequence[int]) -> None:
        if len(offset) != tensor.dim() or any(each < 0 for each in offset):
            raise ArgumentError(
                f"offset: expected an index >= 0 for each of the {tensor.dim()} dims of the shard, got {offset!r}"
            )
        self.tensor = tensor
        self.offset: tuple[int, ...] = tuple(offset)


class Local(NamedTuple):
    """This rank's shard of one tensor."""

    tensor: torch.Tensor
    """One-dimensional, without a copy."""
    box: Box
    dtype: str


def locals_of(state: Any) -> dict[str, Local]:
    """Return the tensors of a state dict, nested ones included, by their dotted names; tensors without a shard on this
    rank are omitted.

    Args:
        state: a mapping of names to tensors, DTensors, Parts, or mappings of the same kind; numbers and other values
            are ignored.

    Raises:
        ArgumentError: it is not a mapping, has no tensor, or one of them cannot be copied.
    """
    if not is_mapping(state):
        raise ArgumentError(f"state: expected a mapping of names to tensors, got {type(state).__name__}")
    found = {name: local for name, value in _leaves(state, "") if (local := _local(name, value)) is not None}
    if not found:
        raise ArgumentError("the state has no tensors")
    return {name: local for name, local in found.items() if elements(local.box)}


def _leaves(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if is_mapping(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _local(name: str, value: Any) -> Local | None:
    offset: Sequence[int] | None = None
    if isinstance(value, Part):
        value, offset = value.tensor, value.offset
    # Not imported for this: if it is not loaded, nothing is of its type.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        value, offset = _of_distributed(name, value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.numel() and not value.is_contiguous():
        raise ArgumentError(f"{name!r} is not contiguous; pass tensor.contiguous() to copy from it")
    return Local(value.detach().view(-1), box_of(value.shape, offset), str(value.dtype).removeprefix("torch."))


def _of_distributed(name: str, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    if any(placement.is_partial() for placement in value.placements):
        raise ArgumentError(
            f"{name!r} has a Partial placement; redistribute it to Replicate or Shard before you copy it"
        )
    local = value.to_local()
    shape, offset = local_box(value.shape, value.device_mesh, value.placements)
    if shape != tuple(local.shape):
        raise ArgumentError(
            f"{name!r}: expected one contiguous shard on each rank, got the placements {value.placements}; "
            f"redistribute it first"
        )
    return local, offset
