"""Handing the state of one actor to others of its mesh, as the program conducts it: it needs no torch for that."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._node.services.registry import name_of
from monarch._state.handoff import receiver
from monarch.exceptions import ArgumentError, MonarchError, SupervisionError

_HOOKS = ("__getstate__", "__setstate__")


class StateTransfer:
    """Gives the state of an actor to others.

    Args:
        mesh: of the actors.
        new: base ranks of those that are to have it; those without an actor of the mesh are left out.
        source: base rank of the one that has it; None for any that is not among ``new``.
    """

    def __init__(self, mesh: ActorMesh, new: Sequence[int], source: int | None) -> None:
        self._mesh = mesh
        self._new = [rank for rank in new if mesh._state.region.position_of(rank) is not None]
        self._source = giver_of(mesh, self._new, source) if self._new else 0

    @staticmethod
    def check(meshes: Sequence[ActorMesh], named: bool) -> None:
        """ArgumentError for a class without the two methods: if it was named, or if none has them."""
        able = [mesh for mesh in meshes if has_hooks(mesh._state.cls)]
        if not able or (named and len(able) < len(meshes)):
            raise ArgumentError(
                "copy_from needs actors whose class has __getstate__ and __setstate__: the first returns what a "
                "replica needs, the second takes it; or name a method that returns their tensors: copy='weights'"
            )

    def run(
        self,
        timeout: float,
        give: Callable[..., Any] = receiver.state_of,
        take: Callable[..., Any] = receiver.set_state,
        *args: Any,
    ) -> Any:
        """Do it; what ``give`` had to say beside the state is returned.

        Args:
            timeout: seconds for each step.
            give: service that gets the actor and ``args``, and returns the state and what it has to say.
            take: one that gets the actor and the state.
            args: for the first.
        """
        if not self._new or (give is receiver.state_of and not has_hooks(self._mesh._state.cls)):
            return None
        token = secrets.token_hex(8)
        source = member_of(self._mesh, self._source)
        try:
            packed, said = endpoint_of(source, receiver.pack).call_one(token, name_of(give), args).get(timeout)
            answers = [
                endpoint_of(member_of(self._mesh, rank), receiver.unpack).call_one(packed, name_of(take), timeout)
                for rank in self._new
            ]
            failures = [answer.exception(timeout + 5.0) for answer in answers]
        finally:
            with suppress(MonarchError):
                ask(source, receiver.end, token)
        for failure in failures:
            if failure is not None:
                raise failure
        return said


def giver_of(mesh: ActorMesh, new: Sequence[int], source: int | None) -> int:
    """Return the base rank of the actor that new ones get their state from; SupervisionError if none has lived on.

    Args:
        mesh: of the actors.
        new: base ranks of those that are to have it.
        source: the one that was named; None for any other.
    """
    living = [rank for rank in mesh._state.region.base_ranks() if rank not in new]
    if living and (source is None or source in living):
        return living[0] if source is None else source
    whose = "no actor of it has" if source is None else f"rank {source} has not"
    raise SupervisionError(
        f"{mesh._name} is healed, but {whose} lived on, so that there is no state to be copied to "
        f"{describe_ranks(new)}",
        mesh=mesh._name,
        ranks=tuple(new),
    )


def member_of(mesh: ActorMesh, rank: int) -> ActorMesh:
    """Return the actor of a base rank."""
    region = mesh._state.region
    position = region.position_of(rank)
    assert position is not None
    return mesh._view(region)._member(position)


def has_hooks(cls: type) -> bool:
    """Return whether a class says what of its state a replica needs, and takes it."""
    return all(any(name in each.__dict__ for each in cls.__mro__ if each is not object) for name in _HOOKS)
