"""State transfer from one actor to others of its mesh, coordinated by the program without torch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.made_again import begin_afresh
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._meshes.inside import member_at, state_of, view_at
from monarch._node.services.registry import name_of
from monarch._state.contract import BOTH, copied_by
from monarch._state.handoff import receiver
from monarch.exceptions import ActorError, ArgumentError, MonarchError, SupervisionError


class StateTransfer:
    """Copies the state of an actor to others.

    Args:
        mesh: the mesh of the actors.
        new: base ranks of the receivers; ranks without an actor of the mesh are ignored.
        source: base rank of the sender; None for any not in ``new``.
    """

    def __init__(self, mesh: ActorMesh, new: Sequence[int], source: int | None) -> None:
        self._mesh = mesh
        self._new = [rank for rank in new if state_of(mesh).region.position_of(rank) is not None]
        self._source = giver_of(mesh, self._new, source) if self._new else 0

    @staticmethod
    def check(meshes: Sequence[ActorMesh], named: bool) -> None:
        """Raise ArgumentError for a class without methods that give and take its state."""
        able = [mesh for mesh in meshes if copied_by(state_of(mesh).cls)]
        if not able or (named and len(able) < len(meshes)):
            raise ArgumentError(
                f"copy_from needs actors whose class has methods that return and take the state of a replica: {BOTH}; "
                f"or name a method that returns their tensors: copy='weights'"
            )

    def run(
        self,
        timeout: float,
        give: Callable[..., Any] = receiver.state_of,
        take: Callable[..., Any] = receiver.set_state,
        *args: Any,
    ) -> Any:
        """Run the transfer and return the report of ``give``.

        Args:
            timeout: seconds for each step.
            give: service that gets the actor and ``args``, and returns the state and a report.
            take: service that gets the actor and the state.
            args: for ``give``.
        """
        if not self._new or (give is receiver.state_of and not copied_by(state_of(self._mesh).cls)):
            return None
        token = secrets.token_hex(8)
        source = member_of(self._mesh, self._source)
        try:
            packed, report = endpoint_of(source, receiver.pack).call_one(token, name_of(give), args).get(timeout)
            answers = [
                endpoint_of(member_of(self._mesh, rank), receiver.unpack).call_one(packed, name_of(take), timeout)
                for rank in self._new
            ]
            failures = [answer.exception(timeout + 5.0) for answer in answers]
        finally:
            with suppress(MonarchError):
                ask(source, receiver.end, token)
            if give is receiver.state_of:
                self._begin_afresh()
        for rank, failure in zip(self._new, failures, strict=True):
            if isinstance(failure, ActorError):
                # Each was asked alone, as the first of its own mesh.
                failure.failures = {rank: "\n".join(failure.failures.values())}
            if failure is not None:
                raise failure
        return report

    def _begin_afresh(self) -> None:
        """Let the modules in DDP of all actors begin afresh before their next call; those of receivers are others."""
        for rank in state_of(self._mesh).region.base_ranks():
            with suppress(MonarchError):
                endpoint_of(member_of(self._mesh, rank), begin_afresh).broadcast()


def giver_of(mesh: ActorMesh, new: Sequence[int], source: int | None) -> int:
    """Return the base rank of the sender; raise SupervisionError if no actor has survived.

    Args:
        mesh: the mesh of the actors.
        new: base ranks of the receivers.
        source: the requested sender; None for any other.
    """
    living = [rank for rank in state_of(mesh).region.base_ranks() if rank not in new]
    if living and (source is None or source in living):
        return living[0] if source is None else source
    whose = "none of its actors survived" if source is None else f"rank {source} did not survive"
    raise SupervisionError(
        f"{state_of(mesh).name} is healed, but {whose}, so there is no state to copy to {describe_ranks(new)}",
        mesh=state_of(mesh).name,
        ranks=tuple(new),
    )


def member_of(mesh: ActorMesh, rank: int) -> ActorMesh:
    """Return the actor of a base rank."""
    region = state_of(mesh).region
    position = region.position_of(rank)
    assert position is not None
    return member_at(view_at(mesh, region), position)
