"""State transfer between actors, on the ranks: tensors are moved by one-sided reads.

The program imports this file to name its services, so functions import what needs torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from monarch._core.kinds import class_of
from monarch._node.services.registry import function_of, service
from monarch._state.contract import Pair, call_method, copied_by
from monarch._state.ended import has_ended, note_end
from monarch._wire.pickling import dumps, loads

Packed = tuple[bytes, list[tuple[Any, ...]]]
"""A pickled state, with the locations of its large buffers."""

_given: dict[str, tuple[list[memoryview], list[int]]] = {}
"""By token: exported memory and its keys. Threads of actors, in single dict operations."""


# On the sender's rank


@service("handoff.state_of", "actor")
def state_of(actor: Any) -> Any:
    """Return the state without a report."""
    give, _ = _pair(actor)
    state = call_method(actor, give)
    if inspect.isawaitable(state):
        return _with_nothing(state)
    return state, None


async def _with_nothing(state: Any) -> tuple[Any, None]:
    return await state, None


@service("handoff.pack", "actor")
def pack(actor: Any, token: str, give: str, args: tuple[Any, ...]) -> Any:
    """Return the state of an actor, with large buffers exported until ``end``, unless that came first."""
    result = function_of(give)(actor, *args)
    return _pack_awaited(result, token) if inspect.isawaitable(result) else _pack(result, token)


async def _pack_awaited(result: Any, token: str) -> tuple[Packed, Any]:
    return _pack(await result, token)


def _pack(result: tuple[Any, Any], token: str) -> tuple[Packed, Any]:
    from monarch._state.rdma.plane import plane
    from monarch._tensors.memory.views import memory_of

    state, report = result
    body, buffers = dumps(state, "the state", here=True)
    remotes = plane().share_all(memory_of(buffer, "a part of the state") for buffer in buffers)
    _given[token] = buffers, [remote.key for remote in remotes]
    if has_ended(token):
        # The end came while the actor was busy.
        end(token)
    return (body, [tuple(remote) for remote in remotes]), report


@service("handoff.end", "threaded")
def end(token: str) -> None:
    """Service: end the exports of a transfer."""
    from monarch._state.rdma.plane import plane

    note_end(token)
    _, keys = _given.pop(token, ([], []))
    drop: Callable[[int], object] = plane().drop
    for key in keys:
        drop(key)


@service("handoff.release", "actor")
def release(actor: Any, token: str) -> None:
    """Service: the same in its turn among the calls of the actor, after the one that exports."""
    end(token)


@service("handoff.still_given", "quick")
def still_given() -> int:
    """Service: return the number of exported states."""
    return len(_given)


# On the receivers


@service("handoff.set_state", "actor")
def set_state(actor: Any, state: Any) -> Any:
    """Set the state by the actor's own method."""
    _, take = _pair(actor)
    return call_method(actor, take, state)


def _pair(actor: Any) -> Pair:
    pair = copied_by(class_of(actor))
    assert pair is not None, "the program has checked it"
    return pair


@service("handoff.unpack", "actor")
def unpack(actor: Any, packed: Packed, take: str, timeout: float) -> Any:
    """Read the large buffers and set the state of an actor."""
    import numpy

    from monarch._state.rdma.plane import plane
    from monarch._tensors.memory.registry import MemoryReference
    from monarch._tensors.memory.views import memory_of
    from monarch._tensors.transports.base import Move

    body, remotes = packed
    places = [MemoryReference(*remote) for remote in remotes]
    buffers = [numpy.empty(place.size, numpy.uint8).data for place in places]
    if places:
        moves = [
            Move(place, memory_of(buffer, "a part of the state")) for place, buffer in zip(places, buffers, strict=True)
        ]
        plane().move(moves, False, timeout)
    return function_of(take)(actor, loads(body, buffers))
