"""Groups of calls that are watched together: those to one process mesh, once a rank there has failed.

Usually the ranks of one call wait for each other, and so do those of calls to single ranks, of a broadcast, and of
constructors. It costs nothing until something fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import ref

from monarch._core.roster import split_proc
from monarch._groups.pipelined import Failures
from monarch._meshes.inside import state_of, targets_of
from monarch._meshes.registry import meshes_of
from monarch._node.node import Node
from monarch._node.replies.owed import Unanswered, WatchedCall

# Imported now: the first failure is handled in the receiving thread, where an import would run import hooks.
from monarch._supervision.fail_fast import CallGroup
from monarch.exceptions import CallTimeoutError

if TYPE_CHECKING:
    from monarch._wire import messages as m


class FailureWatch:
    """The call groups of a process with failures, by process mesh.

    Args:
        node: the node of this process.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = RLock()
        self._parties: dict[str, CallGroup] = {}
        """Lock: ``_lock``, as for the next one; emptiness is checked without it."""
        self._unread: dict[str, dict[str, ref[WatchedCall]]] = {}
        """The last failed call of each proc whose error nobody has read: later calls may wait for it."""
        node.events.faulted.subscribe(self.faulted)

    def failed(self, call: WatchedCall, position: int) -> None:
        """Note that a rank of a call has raised; in the receiving thread."""
        self._node.part(Failures).hear(call.port, self._node.ports.last)
        if call.party is None and call.actor and call.watched:
            uid = _uid_of(call)
            # First, so that a call which is made now is under way, or sees this one.
            with self._lock:
                self._unread.setdefault(uid, {})[call.targets[position].proc] = ref(call)
            others = [call, *self._under_way(uid)] if call.waits_for() else list(self._under_way(uid))
            if others:
                self._join(uid, [call, *(each for each in others if each is not call)])
                return
        if call.party is not None:
            call.party.failed(call, position)

    def sent(self, call: WatchedCall) -> None:
        """Note a new call; in the sending thread."""
        self._node.events.sent(call)
        if not self._unread:
            return
        uid = _uid_of(call)
        with self._lock:
            failed = self._still_unread(uid)
        calls = list({id(each): each for each in failed}.values())
        if calls and call.party is None:
            self._join(uid, [*calls, call])

    def settle(self, uid: str, timeout: float) -> None:
        """Wait until the ranks of failed calls to a mesh have ended or were freed, for some seconds at most."""
        with self._lock:
            party = self._parties.get(uid)
        if party is not None:
            with suppress(CallTimeoutError):
                party.ended.get(timeout)

    def ahead(self, call: Any) -> str:
        """Describe what runs in front of a call; empty if nothing is known. May take a moment."""
        from monarch._supervision.behind import ahead_now

        return ahead_now(call)

    def faulted(self, fault: m.Fault) -> None:
        """Note the fault of an actor, for which others may wait; in the receiving thread."""
        mesh = meshes_of(self._node).actor_meshes.get(fault.actor)
        creation = state_of(mesh).creation if mesh is not None else None
        if mesh is None or (creation is not None and fault.rank in creation.raised):
            return
        targets = targets_of(mesh)
        failed = {position for position, peer in enumerate(targets.peers) if peer.proc == fault.src}
        call = Unanswered(self._node, mesh, targets.peers, failed)
        if failed and call.owed:
            uid = _uid_of(call)
            self._join(uid, [call, *self._under_way(uid)])

    def _join(self, uid: str, calls: list[WatchedCall]) -> None:
        """Watch calls as one, next to those already watched."""
        while True:
            with self._lock:
                known = self._parties.get(uid)
                party = known if known is not None and not known.over else CallGroup(calls)
                self._parties[uid] = party
            if party is not known:
                party.join()
                return
            if party.add([call for call in calls if call.party is not party]):
                return

    def _still_unread(self, uid: str) -> list[WatchedCall]:
        """Drop failed calls whose error was read; with the lock."""
        unread = {proc: call for proc, known in self._unread.get(uid, {}).items() if (call := known()) and call.unread}
        if unread:
            self._unread[uid] = {proc: ref(call) for proc, call in unread.items()}
        else:
            self._unread.pop(uid, None)
        return list(unread.values())

    def _under_way(self, uid: str) -> Iterator[WatchedCall]:
        """Return the pending calls to a mesh that are not watched yet."""
        calls: list[Any] = list(self._node.ports.gathers.values())
        for call in calls:
            is_call = getattr(call, "party", self) is None and call.watched and call.actor
            if is_call and call.waits_for() and _uid_of(call) == uid:
                yield call


def _uid_of(call: WatchedCall) -> str:
    return split_proc(call.targets[0].proc)[0]
