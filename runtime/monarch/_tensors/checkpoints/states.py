"""States of models: named tensors, each a whole one or a part of one that several ranks share out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from monarch._core.shapes.boxes import Box, box_of, elements
from monarch._tensors.torch_compat import local_box
from monarch.exceptions import ArgumentError


class Part:
    """A tensor that is a part of a larger one of which other ranks have the rest.

    Args:
        tensor: the part, contiguous.
        offset: the indices in the larger one of its first element, one for each dim.

    Raises:
        ArgumentError: there is not one index for each dim, or one is negative.
    """

    def __init__(self, tensor: torch.Tensor, offset: Sequence[int]) -> None:
        if len(offset) != tensor.dim() or any(each < 0 for each in offset):
            raise ArgumentError(
                f"offset has one index of at least 0 for each of the {tensor.dim()} dims of the part, and is {offset!r}"
            )
        self.tensor = tensor
        self.offset: tuple[int, ...] = tuple(offset)


class Local(NamedTuple):
    """What this rank has of one tensor."""

    tensor: torch.Tensor
    """One-dimensional, the memory itself."""
    box: Box
    dtype: str


def locals_of(state: Any) -> dict[str, Local]:
    """The tensors of a state dict, also of nested ones, by their names with dots; those of which this rank has nothing
    are left out.

    Args:
        state: a mapping of names to tensors, DTensors, Parts, or mappings of the same kind; numbers and other values
            are left out.

    Raises:
        ArgumentError: it is no mapping, has no tensor, or one of them cannot be copied from or to.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"a state is a mapping of names to tensors, and not {type(state).__name__}")
    found = {name: local for name, value in _leaves(state, "") if (local := _local(name, value)) is not None}
    if not found:
        raise ArgumentError("the state has no tensors")
    return {name: local for name, local in found.items() if elements(local.box)}


def _leaves(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _local(name: str, value: Any) -> Local | None:
    offset: Sequence[int] | None = None
    if isinstance(value, Part):
        value, offset = value.tensor, value.offset
    # Not imported for this: if it is not there, nothing is of its kind.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        value, offset = _of_distributed(name, value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.numel() and not value.is_contiguous():
        raise ArgumentError(
            f"{name!r} is not contiguous, and its memory is copied as it lies; give tensor.contiguous() to copy from it"
        )
    return Local(value.detach().view(-1), box_of(value.shape, offset), str(value.dtype).removeprefix("torch."))


def _of_distributed(name: str, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    if any(placement.is_partial() for placement in value.placements):
        raise ArgumentError(f"{name!r} is a partial sum on each rank; redistribute it before it is copied")
    local = value.to_local()
    shape, offset = local_box(value.shape, value.device_mesh, value.placements)
    if shape != tuple(local.shape):
        raise ArgumentError(f"{name!r} is laid out in a way that is not one box on each rank: {value.placements}")
    return local, offset
