"""The endpoints of a copy on ranks: export tensors, and fetch assigned parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from monarch._core.kinds import class_of
from monarch._core.reshard import Fetch
from monarch._core.shapes.boxes import Box, runs
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._state.ended import has_ended, note_end
from monarch._state.rdma.plane import plane
from monarch._tensors.checkpoints.states import Local, locals_of
from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.memory.views import Memory, memory_of
from monarch._tensors.transports.base import Move
from monarch.exceptions import ArgumentError


class Shared(NamedTuple):
    """An exported tensor."""

    remote: MemoryReference
    box: Box
    dtype: str
    width: int
    """Bytes of an element."""


class CopyEndpoint(NamedTuple):
    """The exported tensors of a process."""

    host: str
    tensors: dict[str, Shared]


_open: dict[str, tuple[dict[str, Local], list[int]]] = {}
"""By the token of the copy: the tensors, and the keys of their exports. Threads of actors, in single operations."""


@service("copy.share", "actor")
def share(actor: Any, method: str, token: str) -> Any:
    """Export the tensors that a method of an actor returns."""
    function = getattr(class_of(actor), method, None)
    function = getattr(function, "method", function)
    if not callable(function):
        raise ArgumentError(f"{type(actor).__name__} has no method {method!r} that returns its state")
    state = function(actor)
    if inspect.isawaitable(state):
        return _share_awaited(state, token)
    return share_state(state, token)


async def _share_awaited(state: Any, token: str) -> CopyEndpoint:
    return share_state(await state, token)


def share_state(state: Any, token: str) -> CopyEndpoint:
    """Export the tensors of a state until ``end``, unless that came first."""
    tensors = locals_of(state)
    remotes = plane().share_all(memory_of(local.tensor, repr(name)) for name, local in tensors.items())
    shared = {
        name: Shared(remote, local.box, local.dtype, local.tensor.element_size())
        for (name, local), remote in zip(tensors.items(), remotes, strict=True)
    }
    _open[token] = (tensors, [each.remote.key for each in shared.values()])
    if has_ended(token):
        # The end came while the actor was busy.
        end(token)
    return CopyEndpoint(current_node().host, shared)


@service("copy.fetch", "actor")
def fetch(actor: Any, token: str, fetches: list[tuple[Fetch, MemoryReference, Box]], timeout: float) -> int:
    """Copy remote parts of tensors into an actor's tensors and return the number of bytes."""
    tensors = _open[token][0]
    moves: list[Move] = []
    for wanted, remote, remote_box in fetches:
        local = tensors[wanted.name]
        width = local.tensor.element_size()
        memory = memory_of(local.tensor, repr(wanted.name))
        moves.append(_move(wanted.box, remote, remote_box, memory, local.box, width))
    plane().move(moves, False, timeout)
    return sum(move.size for move in moves)


def _move(part: Box, remote: MemoryReference, remote_box: Box, memory: Memory, local_box: Box, width: int) -> Move:
    shared = runs(part, remote_box, local_box)
    spans = numpy.stack([shared.there, shared.here, numpy.full_like(shared.here, shared.length)], 1) * width
    return Move(remote, memory, spans)


@service("copy.end", "threaded")
def end(token: str) -> None:
    """Service: end the exports of a copy."""
    note_end(token)
    _, keys = _open.pop(token, ({}, []))
    drop: Callable[[int], bool] = plane().drop
    for key in keys:
        drop(key)


@service("copy.still_open", "quick")
def still_open() -> int:
    """Service: return the number of copies with exports here."""
    return len(_open)
