"""Handing the state of one actor to others, on the ranks: its tensors go by one-sided reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from monarch._node.services.registry import function_of, service
from monarch._state.rdma.plane import plane
from monarch._tensors.memory.registry import Remote
from monarch._tensors.memory.views import memory_of
from monarch._tensors.transports.base import Move
from monarch._wire.pickling import dumps, loads

Packed = tuple[bytes, list[tuple[Any, ...]]]
"""A pickled state, and where the large memory in it is to be read."""

_given: dict[str, tuple[list[memoryview], list[int]]] = {}
"""By token: the memory that others read here, and the keys that it has."""


# On the rank that has the state


@service("handoff.state_of", "actor")
def state_of(actor: Any) -> Any:
    """Return the state, and nothing more to say."""
    state = actor.__getstate__()
    if inspect.isawaitable(state):
        return _with_nothing(state)
    return state, None


async def _with_nothing(state: Any) -> tuple[Any, None]:
    return await state, None


@service("handoff.pack", "actor")
def pack(actor: Any, token: str, give: str, args: tuple[Any, ...]) -> Any:
    """In the actor: its state, with large memory shared until ``end``."""
    found = function_of(give)(actor, *args)
    return _pack_awaited(found, token) if inspect.isawaitable(found) else _pack(found, token)


async def _pack_awaited(found: Any, token: str) -> tuple[Packed, Any]:
    return _pack(await found, token)


def _pack(found: tuple[Any, Any], token: str) -> tuple[Packed, Any]:
    state, said = found
    body, buffers = dumps(state, "the state", here=True)
    here = plane()
    remotes = [here.share(memory_of(buffer, "a part of the state")) for buffer in buffers]
    _given[token] = buffers, [remote.key for remote in remotes]
    return (body, [tuple(remote) for remote in remotes]), said


@service("handoff.end", "threaded")
def end(token: str) -> None:
    """Service: nobody reads here any more."""
    _, keys = _given.pop(token, ([], []))
    drop: Callable[[int], object] = plane().drop
    for key in keys:
        drop(key)


@service("handoff.still_given", "quick")
def still_given() -> int:
    """Service: how many states this process shares."""
    return len(_given)


# On those that take it


@service("handoff.set_state", "actor")
def set_state(actor: Any, state: Any) -> Any:
    """By the actor's own method."""
    return actor.__setstate__(state)


@service("handoff.unpack", "actor")
def unpack(actor: Any, packed: Packed, take: str, timeout: float) -> Any:
    """In the actor: reads what is large, and takes the state."""
    import numpy

    body, remotes = packed
    places = [Remote(*remote) for remote in remotes]
    buffers = [numpy.empty(place.size, numpy.uint8).data for place in places]
    if places:
        moves = [
            Move(place, memory_of(buffer, "a part of the state")) for place, buffer in zip(places, buffers, strict=True)
        ]
        plane().move(moves, False, timeout)
    return function_of(take)(actor, loads(body, buffers))
