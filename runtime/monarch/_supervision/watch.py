"""Which calls of this process are watched over together: those to one mesh of processes, once a rank there has failed.

The ranks of one call wait for each other most often, and so do those of calls to single ranks, of a broadcast, of
constructors. It costs nothing as long as nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import ref

from monarch._core.roster import split_proc
from monarch._groups.pipelined import Failures
from monarch._meshes.registry import meshes_of
from monarch._node.node import Node
from monarch._node.owed import Unanswered, Watched

# Not when the first rank fails: that is noticed in the receiving thread, where an import would run import hooks.
from monarch._supervision.fail_fast import CallGroup

if TYPE_CHECKING:
    from monarch._wire import messages as m


class Watch:
    """The parties of a process that calls have come into by failing, by mesh of processes.

    Args:
        node: of this process.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = RLock()
        self._parties: dict[str, CallGroup] = {}
        """Lock: ``_lock``, as the next one; a dict that is empty is seen so without it."""
        self._unread: dict[str, dict[str, ref[Watched]]] = {}
        """Of each proc, the last call that has failed there, if nobody has read its error: calls that follow may wait
        for it."""
        node.events.faulted.subscribe(self.faulted)

    def failed(self, call: Watched, position: int) -> None:
        """The code of a rank of a call has raised; in the receiving thread."""
        self._node.part(Failures).hear(call.port, self._node.ports.last)
        if call.party is None and call.actor and call.watched:
            uid = _uid_of(call)
            others = [call, *self._under_way(uid)] if call.waits_for() else list(self._under_way(uid))
            with self._lock:
                self._unread.setdefault(uid, {})[call.targets[position].proc] = ref(call)
            if others:
                self._join(uid, [call, *(each for each in others if each is not call)])
                return
        if call.party is not None:
            call.party.failed(call, position)

    def sent(self, call: Watched) -> None:
        """A call was sent just now; in the thread that sends."""
        if not self._unread:
            return
        uid = _uid_of(call)
        with self._lock:
            failed = self._still_unread(uid)
        calls = list({id(each): each for each in failed}.values())
        if calls and call.party is None:
            self._join(uid, [*calls, call])

    def ahead(self, call: Any) -> str:
        """What runs in front of a call, in words; empty if nothing is known to. It may take a moment."""
        from monarch._supervision.behind import ahead_now

        return ahead_now(call)

    def faulted(self, fault: m.Fault) -> None:
        """An actor has failed where nobody waits for an answer: others may wait for it; in the receiving thread."""
        mesh = meshes_of(self._node).actor_meshes.get(fault.actor)
        birth = mesh._state.birth if mesh is not None else None
        if mesh is None or (birth is not None and fault.rank in birth.raised):
            return
        targets = mesh._members_at()
        failed = {position for position, peer in enumerate(targets.peers) if peer.proc == fault.src}
        call = Unanswered(self._node, mesh, targets.peers, failed)
        if failed and call.owed:
            uid = _uid_of(call)
            self._join(uid, [call, *self._under_way(uid)])

    def _join(self, uid: str, calls: list[Watched]) -> None:
        """Watch over calls as one, beside those that are watched over already."""
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

    def _still_unread(self, uid: str) -> list[Watched]:
        """Forget the others; with the lock."""
        found = {proc: call for proc, known in self._unread.get(uid, {}).items() if (call := known()) and call.unread}
        if found:
            self._unread[uid] = {proc: ref(call) for proc, call in found.items()}
        else:
            self._unread.pop(uid, None)
        return list(found.values())

    def _under_way(self, uid: str) -> Iterator[Watched]:
        """Return the calls to a mesh that wait for answers, and that nothing else watches over."""
        calls: list[Any] = list(self._node.ports.gathers.values())
        for call in calls:
            is_call = getattr(call, "party", self) is None and call.watched and call.actor
            if is_call and call.waits_for() and _uid_of(call) == uid:
                yield call


def _uid_of(call: Watched) -> str:
    return split_proc(call.targets[0].proc)[0]
