"""Constructors that go on when others of their spawn have raised: later calls must not meet them in a collective.

Before the error of a spawn is shown, each rank of its mesh of processes knows that what such a constructor waits in, or
comes to, has no end; and that the groups that they have are to be made anew. What is called next comes after that.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.rendezvous import doom, leave_generation
from monarch._node.services.asking import Answers
from monarch._node.services.registry import request

if TYPE_CHECKING:
    from monarch._node.node_like import NodeLike
    from monarch._wire import messages as m

_PATIENCE = 1.0
"""Seconds to wait at most for ranks to say that they know."""


class FailedSpawn(Protocol):
    """A spawn some of whose constructors have raised; see birth.py."""

    mesh: str
    raised: dict[int, m.Reply]

    @property
    def actor(self) -> str: ...
    @property
    def port(self) -> int: ...
    def proc_ids(self) -> list[str]: ...


class SpawnAbort:
    """Tells the ranks of a spawn that has failed; runs in the receiving thread and does not wait there.

    Args:
        node: of this process.
        birth: the spawn.
        then: called once when all know, or some time has passed.
    """

    def __init__(self, node: NodeLike, birth: FailedSpawn, then: Callable[[], None]) -> None:
        self._node, self._then = node, then
        failed = sorted(birth.raised)
        self._reason = (
            f"the collective could not end, since the constructor of {birth.mesh} failed on {describe_ranks(failed)}; "
            f"use the group again to make it anew"
        )
        self._lock = RLock()
        self._round = 0
        """The newest round of those that have answered. Lock: ``_lock``, as the next ones."""
        self._over = False
        self._procs = birth.proc_ids()
        self._left = {proc for proc in self._procs if node.peers.get(proc).dead is None}
        named = request(doom, birth.actor, node.proc, birth.port, self._reason, failed)
        self._answers = Answers(node, self._procs, named, self._heard) if self._left else None
        node.receive_loop.call_later(_PATIENCE if self._left else 0.0, self._end)

    def _heard(self, proc: str, answer: Any) -> None:
        with self._lock:
            self._left.discard(proc)
            if isinstance(answer, int):
                self._round = max(self._round, answer)
            if self._left:
                return
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        if self._answers is not None:
            self._answers.close()
        if self._round:
            Answers(self._node, self._procs, request(leave_generation, self._reason, self._round)).close()
        self._then()
