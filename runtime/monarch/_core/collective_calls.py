"""Whether the calls of the ranks of a process group are parts of one collective. No I/O, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple


class TensorInfo(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return it as in ``float32[4, 2]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def fits(self, other: TensorInfo) -> bool:
        """Return whether the other one can receive this one: torch copies elements whatever their shape."""
        return self.dtype == other.dtype and math.prod(self.shape) == math.prod(other.shape)


class CollectiveCall(NamedTuple):
    """A rank's part of a collective."""

    kind: str
    """As in ``all_reduce``."""
    reduction: str
    """As in ``sum``; empty if there is none, or if it is unknown."""
    root: int
    """The source or destination, numbered in the group; -1 if there is none."""
    inputs: tuple[TensorInfo, ...]
    """The tensors that the rank sends; for kinds with a tensor for each rank, by rank in the group."""
    outputs: tuple[TensorInfo, ...]
    """The tensors that it receives, likewise."""
    place: str
    """Where, as in ``cell [3] line 2: dist.all_reduce(x)``; empty if unknown."""

    def packed(self) -> str:
        """Return it as text."""
        return json.dumps(self)

    @staticmethod
    def unpacked(data: str) -> CollectiveCall:
        """Return what ``packed`` has packed."""
        kind, reduction, root, inputs, outputs, place = json.loads(data)
        return CollectiveCall(kind, reduction, root, _tensors(inputs), _tensors(outputs), place)

    def text(self, root: int) -> str:
        """Describe it without its place.

        Args:
            root: the number to show for the source or destination.
        """
        words = [self.kind + (f" ({self.reduction})" if self.reduction else "")]
        shown = self.inputs or self.outputs
        if shown:
            words.append(f"of {_list_text(shown)}")
        if self.inputs and self.outputs and self.kind in _PAIRED:
            words.append(f"into {_list_text(self.outputs)}")
        if root >= 0:
            words.append(f"{'to' if self.kind in ('reduce', 'gather') else 'from'} rank {root}")
        return " ".join(words)


_PAIRED = {"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter"}
"""Collectives with a tensor for each rank; the others take the same on all ranks."""
_SHOWN = 4


def _tensors(packed: list[tuple[str, list[int]]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(dtype, tuple(shape)) for dtype, shape in packed)


def _list_text(tensors: tuple[TensorInfo, ...]) -> str:
    if len(tensors) == 1:
        return str(tensors[0])
    if len(set(tensors)) == 1:
        return f"{len(tensors)} of {tensors[0]}"
    more = f", ... ({len(tensors)} in all)" if len(tensors) > _SHOWN else ""
    return f"[{', '.join(map(str, tensors[:_SHOWN]))}{more}]"


def agree(calls: Mapping[int, CollectiveCall]) -> bool:
    """Return whether calls are parts of one collective.

    Args:
        calls: by rank in the group, of all of its ranks.
    """
    first = calls[min(calls)]
    if any(each[:3] != first[:3] for each in calls.values()):
        return False
    if first.kind not in _PAIRED:
        return all(each.inputs == first.inputs for each in calls.values())
    return all(_fit(calls, source, target) for source in calls for target in calls)


def _fit(calls: Mapping[int, CollectiveCall], source: int, target: int) -> bool:
    """Return whether a rank receives what another one gives it."""
    given, taken = calls[source], calls[target]
    match given.kind:
        case "all_gather":
            return _at(given.inputs, 0, taken.outputs, source)
        case "reduce_scatter":
            # All ranks reduce the same parts.
            return given.inputs == taken.inputs and _at(given.inputs, target, taken.outputs, 0)
        case "gather":
            return target != given.root or _at(given.inputs, 0, taken.outputs, source)
        case "scatter":
            return source != given.root or _at(given.inputs, target, taken.outputs, 0)
        case _:
            return _at(given.inputs, target, taken.outputs, source)


def _at(given: tuple[TensorInfo, ...], at: int, taken: tuple[TensorInfo, ...], place: int) -> bool:
    return at < len(given) and place < len(taken) and given[at].fits(taken[place])
