"""The timeouts of collectives and messages, which do not count while a rank of the mesh is paused.

gloo and NCCL fix the deadline of a collective as it begins, and know nothing of pauses. So they get a timeout that
never ends, and each rank watches its groups: a collective that has not ended after the real timeout breaks the group,
unless a rank is paused, or was paused less than a timeout ago (decision 0073).
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._actors.pausing.gate import gate
from monarch._actors.table import actors_of
from monarch._core.text.mismatch import describe_late_message, describe_timeout
from monarch._groups.breaking import spoil, spoil_generation
from monarch._groups.rendezvous import is_dead, local_rendezvous
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.asking import ask_soon, tell_proc
from monarch._node.services.registry import request, service
from monarch._python.threads import spawn_thread
from monarch._tensors.torch_compat import begun_by
from monarch._wire.receiving.aside import tell

if TYPE_CHECKING:
    from monarch._tensors.collectives.open_messages import OpenMessage
    from monarch._tensors.collectives.timeouts import UntimedBackend

_SHARE = 0.1
"""Part of the shortest timeout between two looks."""
_SHORTEST, _LONGEST = 0.1, 5.0
"""Bounds of that, in seconds."""
_HALF = 0.5
"""Part of a timeout from which on a collective is looked for that has not ended."""
_ANSWER_S = 1.0
"""Seconds for the ranks to tell when they were paused."""


class _Seen(NamedTuple):
    """A group at the last look."""

    generation: int
    """Of the groups of the mesh: with new connections, a group counts from the beginning."""
    number: int
    """The collectives that were begun."""
    since: float
    """When the timeout of the last one began."""
    ended: bool
    """Whether they have all ended, as far as is known."""


class _Watch:
    """Watches the groups of this rank, in a thread of its own from the first one on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = False
        """Whether the thread has begun. Lock: ``_lock``."""
        self._new = threading.Event()
        """Set when there is a new group."""

    def hold(self, group: Any) -> None:
        """Watch a group that has just been made, in place of its backends."""
        from monarch._tensors.collectives.timeouts import held_groups, hold_timeout, let_go

        if not hold_timeout(group):
            return
        self._new.set()
        with self._lock:
            begins, self._runs = not self._runs, True
        if not begins:
            return
        try:
            spawn_thread("monarch-timeouts", self._run, current_node())
        except RuntimeError:
            # There is no room for a thread; the next group tries again.
            with self._lock:
                self._runs = False
            for held in held_groups():
                let_go(held)

    def look_again(self) -> None:
        """Look at the groups now; a look while they were renewed may have missed some."""
        self._new.set()

    def _run(self, node: Node) -> None:
        seen: dict[UntimedBackend, _Seen] = {}
        wait = _SHORTEST
        is_told = False
        while not node.closed:
            self._new.wait(wait)
            self._new.clear()
            try:
                seen, wait = self._look(node, seen)
            except Exception as error:
                # The next look may succeed; without one, a collective that hangs would have no timeout at all.
                if not is_told:
                    tell(f"monarch: checking the timeouts of collectives failed: {type(error).__name__}: {error}")
                is_told, wait = True, _LONGEST

    @staticmethod
    def _look(node: Node, before: dict[UntimedBackend, _Seen]) -> tuple[dict[UntimedBackend, _Seen], float]:
        from monarch._tensors.collectives.open_messages import open_messages
        from monarch._tensors.collectives.timeouts import held_groups

        seen: dict[UntimedBackend, _Seen] = {}
        held = held_groups()
        for each, seconds in held.items():
            # A group that is being destroyed.
            with suppress(RuntimeError):
                seen[each] = _look_at(node, each, seconds, before.get(each))
        for message in open_messages():
            _look_at_message(node, message)
        shortest = min(held.values(), default=math.inf)
        return seen, min(max(shortest * _SHARE, _SHORTEST), _LONGEST)


def _look_at(node: Node, held: UntimedBackend, seconds: float, before: _Seen | None) -> _Seen:
    from monarch._tensors.collectives.timeouts import let_go, unended

    generation, number, now = local_rendezvous().generation, begun_by(*held), time.monotonic()
    if before is None or before[:2] != (generation, number):
        return _Seen(generation, number, now, False)
    if before.ended or now - before.since < seconds * _HALF:
        return before
    oldest = unended(held)
    if oldest is None:
        # Without a record of them, the timeouts are left to the backend.
        let_go(held)
        return before._replace(ended=True)
    if not oldest.operation:
        # Messages of NCCL are not counted, so later ones do not change the number.
        return before._replace(ended=True) if held.device == "cpu" else before._replace(since=now)
    before = before._replace(since=max(before.since, now - oldest.seconds))
    if now - before.since < seconds:
        return before
    more = more_time(seconds)
    if more:
        return before._replace(since=time.monotonic() - seconds + more)
    node.receive_loop.post(lambda: _expire(held, number, oldest.operation, seconds))
    return before._replace(ended=True)


def _look_at_message(node: Node, message: OpenMessage) -> None:
    """Expire a message that a thread has waited for too long, unless a rank was paused meanwhile."""
    now, seconds = time.monotonic(), message.seconds
    if now - message.since < seconds:
        return
    more = more_time(seconds)
    # If it has expired, the next look has nothing to do until the thread has left its wait.
    message.since = time.monotonic() - seconds + (more or seconds)
    if not more:
        node.receive_loop.post(lambda: _expire_message(message))


def _expire(held: UntimedBackend, number: int, operation: str, seconds: float) -> None:
    """Break the groups of this rank, since a collective has not ended in time; in the receiving thread."""
    from monarch._tensors.collectives.timeouts import held_groups, name_of

    with suppress(RuntimeError):
        if held in held_groups() and begun_by(*held) == number:
            _break(describe_timeout(operation, name_of(held.group), seconds))


def _expire_message(message: OpenMessage) -> None:
    """Break the groups of this rank, since a message has not ended in time; in the receiving thread."""
    from monarch._tensors.collectives.open_messages import is_open
    from monarch._tensors.collectives.timeouts import name_of

    # Its group may be destroyed meanwhile.
    with suppress(RuntimeError, KeyError, ValueError):
        if is_open(message):
            name = name_of(message.group)
            _break(describe_late_message(message.sends, message.peer, name, message.seconds))


def _break(reason: str) -> None:
    own, node = local_rendezvous(), current_node()
    # Others may be in collectives that fail as connections close here, or in none, and are not to use them again.
    for proc in _others():
        if not is_dead(proc):
            tell_proc(node, proc, explain, reason, own.generation)
            tell_proc(node, proc, spoil_generation, reason, own.generation)
    explain(reason, own.generation)
    spoil(reason)


@service("timeouts.explain", "quick")
def explain(reason: str, number: int) -> None:
    """Service: note why collectives of the running calls break, unless a newer generation of groups has begun."""
    own = local_rendezvous()
    if own.generation != number:
        return
    for mailbox in list(actors_of(current_node()).here.values()):
        for call in (mailbox.running, *list(mailbox.turns.tasks.values())):
            if call is not None:
                own.calls.free(call.src, call.port, reason)


def _others() -> list[str]:
    """Return the other ranks of the mesh."""
    procs = local_rendezvous().procs()
    return [procs.proc(rank) for rank in range(procs.size) if rank != current_node().rank]


def more_time(seconds: float) -> float:
    """Return by how many seconds to extend an ended timeout; 0 unless a rank of the mesh was paused meanwhile.

    Args:
        seconds: the timeout. It begins again when the last rank is resumed.
    """
    answers = ask_soon([proc for proc in _others() if not is_dead(proc)], request(since_pause), _ANSWER_S)
    ago = min([gate.since_pause(), *(each for each in answers.values() if type(each) is float)])
    return seconds - ago if ago < seconds else 0.0


@service("timeouts.since_pause", "quick")
def since_pause() -> float:
    """Service: return how many seconds ago this rank was last paused; 0 while it is, infinity if it never was."""
    return gate.since_pause()


_watch = _Watch()


def watch_timeout(group: Any) -> None:
    """Watch the timeout of a group that has just got another one."""
    _watch.hold(group)


def begin_watching_timeouts() -> None:
    """Watch the timeouts of the groups that this rank makes from now on; once."""
    from monarch._tensors.collectives import agreeing, made_groups

    made_groups.on_made.append(_watch.hold)
    made_groups.on_renewed.append(_watch.look_again)
    agreeing.more_time.append(more_time)
