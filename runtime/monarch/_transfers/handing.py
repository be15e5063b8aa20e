"""Handing the state of one actor to others of its mesh: what it returns, with its tensors by one-sided reads."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.call import Endpoint
from monarch._actors.cells import FUNCTION
from monarch._actors.functions import function_of
from monarch._actors.services import ask
from monarch._core.ranks import describe_ranks
from monarch._tensors.memory import memory_of
from monarch._tensors.registry import Remote
from monarch._tensors.transport import Move
from monarch._transfers.plane import plane
from monarch._wire.pickling import dumps, loads
from monarch.exceptions import ArgumentError, MonarchError, SupervisionError

_HERE = "monarch._transfers.handing"
Packed = tuple[bytes, list[tuple[Any, ...]]]
"""A pickled state, and where the large memory in it is to be read."""

_given: dict[str, tuple[list[memoryview], list[int]]] = {}
"""By token: the memory that others read here, and the keys that it has."""


class Handing:
    """Gives the state of an actor to others.

    Args:
        mesh: of the actors.
        new: base ranks of those that are to have it; those without an actor of the mesh are left out.
        source: base rank of the one that has it; None for any that is not among ``new``.
    """

    def __init__(self, mesh: ActorMesh, new: Sequence[int], source: int | None) -> None:
        region = mesh._state.region
        self._mesh = mesh
        self._whole = mesh._view(region)
        self._new = [rank for rank in new if region.position_of(rank) is not None]
        living = [rank for rank in region.base_ranks() if rank not in new]
        if self._new and (not living or (source is not None and source not in living)):
            whose = "no actor of it has" if source is None else f"rank {source} has not"
            raise SupervisionError(
                f"{mesh._name} is healed, but {whose} lived on, so that there is no state to be copied to "
                f"{describe_ranks(self._new)}",
                mesh=mesh._name,
                ranks=tuple(self._new),
            )
        self._source = living[0] if source is None and living else source

    @staticmethod
    def check(meshes: Sequence[ActorMesh], named: bool) -> None:
        """ArgumentError for a class without the two methods: if it was named, or if none has them."""
        able = [mesh for mesh in meshes if has_hooks(mesh._state.cls)]
        if not able or (named and len(able) < len(meshes)):
            raise ArgumentError(
                "copy_from needs actors whose class has __getstate__ and __setstate__: the first returns what a "
                "replica needs, the second takes it; or name a method that returns their tensors: copy='weights'"
            )

    def run(self, timeout: float, give: str = f"{_HERE}:state_of", take: str = f"{_HERE}:set_state", *args: Any) -> Any:
        """Does it; what ``give`` had to say beside the state is returned.

        Args:
            timeout: seconds for each step.
            give: ``module:function`` that gets the actor and ``args``, and returns the state and what it has to say.
            take: one that gets the actor and the state.
            args: for the first.
        """
        if not self._new or (give.startswith(_HERE) and not has_hooks(self._mesh._state.cls)):
            return None
        token = secrets.token_hex(8)
        source = self._member(self._source)
        try:
            packed, said = self._call(source, "pack", token, give, args).get(timeout)
            answers = [self._call(self._member(rank), "unpack", packed, take, timeout) for rank in self._new]
            failures = [answer.exception(timeout + 5.0) for answer in answers]
        finally:
            with suppress(MonarchError):
                ask(source, f"{_HERE}:end", token)
        for failure in failures:
            if failure is not None:
                raise failure
        return said

    def _member(self, rank: int | None) -> ActorMesh:
        assert rank is not None
        position = self._mesh._state.region.position_of(rank)
        assert position is not None
        return self._whole._member(position)

    def _call(self, member: ActorMesh, function: str, *args: Any) -> Any:
        return Endpoint[..., Any](member, f"{_HERE}:{function}", None, FUNCTION).call_one(*args)


def has_hooks(cls: type) -> bool:
    """Whether a class says what of its state a replica needs, and takes it."""
    return all(any(name in each.__dict__ for each in cls.__mro__ if each is not object) for name in _HOOKS)


_HOOKS = ("__getstate__", "__setstate__")


# On the rank that has the state


def state_of(actor: Any) -> Any:
    """The state, and nothing more to say."""
    state = actor.__getstate__()
    if inspect.isawaitable(state):
        return _with_nothing(state)
    return state, None


async def _with_nothing(state: Any) -> tuple[Any, None]:
    return await state, None


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


def end(token: str) -> None:
    """Service: nobody reads here any more."""
    _, keys = _given.pop(token, ([], []))
    drop: Callable[[int], object] = plane().drop
    for key in keys:
        drop(key)


def still_given() -> int:
    """Service: how many states this process shares."""
    return len(_given)


# On those that take it


def set_state(actor: Any, state: Any) -> Any:
    """By the actor's own method."""
    return actor.__setstate__(state)


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
