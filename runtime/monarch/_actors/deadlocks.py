"""Deadlocks: each waiting actor looks for a cycle of waits that it is part of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from monarch._actors.awaits import Awaits
from monarch._actors.running import ActorLike
from monarch._core.deadlock import PendingRequest, Probe, WaitGraph
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch._wire.receiving.loop import Waiter
from monarch.exceptions import DeadlockError

if TYPE_CHECKING:
    from monarch._node.future import Future
    from monarch._node.node import Node

_SUSPICIOUS = 0.05
"""Seconds after which a waiting actor begins to look for a deadlock."""
_SHORT = 1.0
"""Waits with a timeout of at most these seconds are not examined."""


class Deadlocks:
    """The waits of a process's actors, and the probes that follow them: see monarch._core.deadlock."""

    def __init__(self, node: Node, actor_of: Callable[[str], ActorLike | None]) -> None:
        self._node = node
        self._actor_of = actor_of
        self._waits = WaitGraph(node.proc, self._state_of)
        self._lock = RLock()
        self._stuck: dict[int, _Blocked | Awaits] = {}
        """The waiters to tell of a deadlock, by the number of the wait; under ``_lock``."""

    # Waits of async endpoints, which do not block their thread

    def awaited(self, mailbox: ActorLike, call: m.Call, future: Future[Any], arrival: asyncio.Future[Any]) -> None:
        """Note that an actor awaits a future; ``arrival`` raises DeadlockError if that waits for the actor's turn."""
        if mailbox.turns.call is call and not arrival.done():
            if mailbox.awaits is None:
                mailbox.awaits = Awaits(mailbox, self)
            mailbox.awaits.add(arrival, future)

    def begin(self, mailbox: ActorLike, texts: dict[PendingRequest, str], awaits: Awaits) -> int:
        """Register a wait of an actor for requests; return its number, 0 if the actor is in another wait."""
        with self._lock:
            try:
                number = self._waits.begin(mailbox.key, texts, texts.__getitem__)
            except ValueError:
                return 0
            self._stuck[number] = awaits
        return number

    def end(self, number: int) -> None:
        """Note the end of a wait."""
        with self._lock:
            self._waits.end(number)
            self._stuck.pop(number, None)

    def ask_around(self, number: int, futures: list[Future[Any]]) -> None:
        """Look for a deadlock that a wait is part of; its waiter is told."""
        with self._lock:
            awaits = self._stuck.get(number)
            still = {request for future in futures for request in self._open(future)}
            for request in self._waits.requests(number):
                if request not in still:
                    self._waits.answered(number, request)
            probes, deadlock = self._waits.probes(number)
        self._send_probes(probes)
        if deadlock is not None and isinstance(awaits, Awaits):
            awaits.tell(deadlock.message(), deadlock.path[0])

    # Waits of sync endpoints

    def wait(self, mailbox: ActorLike, call: m.Call, waiter: Waiter, timeout: float | None) -> bool:
        """Wait in an actor; return False on timeout.

        Raises:
            DeadlockError: the other side waits for this actor.
        """
        receive_loop = self._node.receive_loop
        if timeout is not None and timeout < _SHORT:
            return receive_loop.wait(waiter, timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if receive_loop.wait(waiter, _SUSPICIOUS):
            return True
        return self._wait_watchfully(mailbox, call, waiter, deadline)

    def _wait_watchfully(self, mailbox: ActorLike, call: m.Call, waiter: Any, deadline: float) -> bool:
        node = self._node
        requests, text = self.requests(mailbox, call, waiter)
        if not requests:
            while not node.receive_loop.wait(waiter, max(0.0, min(0.2, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return False
                node.output.idle()
            return True
        if mailbox.awaits is not None and mailbox.executor.loop is not None:
            # The event loop is blocked from here on, so the actor waits for this alone.
            mailbox.awaits.end()
        with self._lock:
            try:
                number = self._waits.begin(mailbox.key, requests, text)
            except ValueError:
                # Another thread of the actor already waits, so the actor does more than wait here.
                number = 0
        if not number:
            return node.receive_loop.wait(
                waiter, None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            )
        with self._lock:
            blocked = self._stuck[number] = _Blocked(waiter, mailbox)
        pause = 0.05
        running, mailbox.running = mailbox.running, call
        mailbox.blocked = True
        try:
            while True:
                node.output.idle()
                with self._lock:
                    answered = set(requests) - set(self.requests(mailbox, call, waiter)[0])
                    for request in answered:
                        self._waits.answered(number, request)
                    probes, deadlock = self._waits.probes(number)
                if deadlock is not None:
                    raise DeadlockError(deadlock.message())
                self._send_probes(probes)
                node.receive_loop.wait(cast("Waiter", blocked), max(0.0, min(pause, deadline - time.monotonic())))
                if blocked.cycle is not None:
                    raise DeadlockError(blocked.cycle)
                if waiter.done:
                    return True
                if time.monotonic() >= deadline:
                    return False
                pause = min(1.0, pause * 2)
        finally:
            mailbox.running = running
            mailbox.blocked = False
            with self._lock:
                self._waits.end(number)
                self._stuck.pop(number, None)

    def requests(
        self, mailbox: ActorLike, call: m.Call, waiter: Any
    ) -> tuple[list[PendingRequest], Callable[[PendingRequest], str]]:
        """Return the requests that an actor waits for, and a function that describes each."""
        return self._open(waiter), lambda _: f"{mailbox.title()}.{call.method}() waits for {waiter.label}"

    def _open(self, waiter: Any) -> list[PendingRequest]:
        actor = getattr(waiter, "actor", "")
        if not actor:
            return []
        return [PendingRequest(self._node.proc, waiter.port, peer.proc, actor) for peer in waiter.waits_for()]

    def _state_of(self, request: PendingRequest) -> Any:
        mailbox = self._actor_of(request.actor)
        return mailbox.state_of(request.proc, request.port) if mailbox is not None else None

    def _send_probes(self, probes: list[Probe]) -> None:
        for probe in probes:
            body = (*probe[:4], tuple(probe.request), probe.path)
            self._node.peers.get(probe.request.target).send(m.encode(m.Probe(probe.request.target, body)))

    def on_probe(self, message: m.Probe) -> None:
        """Handle a probe of another process."""
        proc, actor, wait, round_, request, path = message.body
        with self._lock:
            probes, deadlock = self._waits.receive(
                Probe(proc, actor, wait, round_, PendingRequest(*request), tuple(path))
            )
            blocked = self._stuck.get(deadlock.wait) if deadlock is not None else None
            if isinstance(blocked, _Blocked) and deadlock is not None:
                blocked.cycle = deadlock.message()
        if isinstance(blocked, _Blocked):
            self._node.receive_loop.notify(cast("Waiter", blocked))
        elif blocked is not None and deadlock is not None:
            blocked.tell_from_elsewhere(deadlock.message(), deadlock.path[0])
        self._send_probes(probes)


class _Blocked:
    """Waits for an actor's future and for news of a deadlock."""

    __slots__ = ("_waiter", "cycle", "mailbox")

    def __init__(self, waiter: Future[Any], mailbox: ActorLike) -> None:
        self._waiter = waiter
        self.mailbox = mailbox
        self.cycle: str | None = None

    @property
    def done(self) -> bool:
        return self.cycle is not None or self._waiter.done

    @property
    def thread(self) -> Any:
        return self._waiter.thread

    @thread.setter
    def thread(self, turn: Any) -> None:
        # Completion of either wakes the thread that waits for both.
        self._waiter.thread = turn
