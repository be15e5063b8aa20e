"""Abort of a spawn with failed constructors: later calls must not meet the remaining constructors in a collective.

Before the error of a spawn is raised, each rank of its process mesh learns that collectives of these constructors
cannot end, and that its process groups must be recreated. Later calls come after that.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.breaking import doom, leave_generation
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import request

if TYPE_CHECKING:
    from monarch._node.node_like import NodeLike
    from monarch._wire import messages as m

_PATIENCE = 1.0
"""Seconds to wait for the ranks to confirm."""


class FailedSpawn(Protocol):
    """A spawn with failed constructors; see creation.py."""

    mesh: str
    raised: dict[int, m.Reply]

    @property
    def actor(self) -> str: ...
    @property
    def port(self) -> int: ...
    def proc_ids(self) -> list[str]: ...


class SpawnAbort:
    """Tells the ranks of a failed spawn; runs in the receiving thread without waiting there.

    Args:
        node: the node of this process.
        creation: the spawn.
        then: called once, when all ranks have confirmed or after a bounded time.
    """

    def __init__(self, node: NodeLike, creation: FailedSpawn, then: Callable[[], None]) -> None:
        self._node, self._then = node, then
        failed = sorted(creation.raised)
        self._reason = (
            f"the collective cannot complete because the constructor of {creation.mesh} failed on "
            f"{describe_ranks(failed)}; the next use of the group recreates it"
        )
        self._lock = RLock()
        self._round = 0
        """The newest generation of the ranks that have confirmed. Lock: ``_lock``, also below."""
        self._over = False
        self._procs = creation.proc_ids()
        self._left = {proc for proc in self._procs if node.peers.get(proc).dead is None}
        named = request(doom, creation.actor, node.proc, creation.port, self._reason, failed)
        self._answers = ServiceAnswers(node, self._procs, named, self._heard) if self._left else None
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
            ServiceAnswers(self._node, self._procs, request(leave_generation, self._reason, self._round)).close()
        self._then()
