"""Actors that wait: each looks whether it waits in a circle, which would never end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from monarch._core.deadlock import Probe, Request, Waits
from monarch._procs.pump import Waiter
from monarch._wire import messages as m
from monarch.exceptions import DeadlockError

if TYPE_CHECKING:
    from monarch._actors.cells import Cell
    from monarch._actors.future import Future
    from monarch._actors.runtime import Runtime

_SUSPICIOUS = 0.05
"""Seconds after which an actor that waits begins to look for a circle of actors that wait."""
_SHORT = 1.0
"""A wait of at most so many seconds ends by itself before much would be known of it."""


class Circles:
    """The waits of the actors of one process, and the probes that follow them: see monarch._core.deadlock."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waits = Waits(runtime.proc, self._state_of)
        self._lock = RLock()
        self._stuck: dict[int, _Blocked] = {}

    def wait(self, cell: Cell, call: m.Call, waiter: Waiter, timeout: float | None) -> bool:
        """Waits in an actor; False if the time runs out first.

        Raises:
            DeadlockError: what is waited for waits for this actor.
        """
        pump = self._runtime.pump
        if timeout is not None and timeout < _SHORT:
            return pump.wait(waiter, timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if pump.wait(waiter, _SUSPICIOUS):
            return True
        return self._wait_watchfully(cell, call, waiter, deadline)

    def _wait_watchfully(self, cell: Cell, call: m.Call, waiter: Any, deadline: float) -> bool:
        runtime = self._runtime
        requests, text = self._requests(cell, call, waiter)
        if not requests:
            while not runtime.pump.wait(waiter, max(0.0, min(0.2, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return False
                runtime.idle()
            return True
        with self._lock:
            try:
                number = self._waits.begin(cell.key, requests, text)
            except ValueError:
                # Another thread of the same actor waits already, so this one is not all that the actor does.
                number = 0
        if not number:
            return runtime.pump.wait(waiter, None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        with self._lock:
            blocked = self._stuck[number] = _Blocked(waiter, cell)
        pause = 0.05
        running, cell.running = cell.running, call
        try:
            while True:
                runtime.idle()
                with self._lock:
                    answered = set(requests) - set(self._requests(cell, call, waiter)[0])
                    for request in answered:
                        self._waits.answered(number, request)
                    probes, deadlock = self._waits.probes(number)
                if deadlock is not None:
                    raise DeadlockError(deadlock.message())
                self._send_probes(probes)
                runtime.pump.wait(cast("Waiter", blocked), max(0.0, min(pause, deadline - time.monotonic())))
                if blocked.circle is not None:
                    raise DeadlockError(blocked.circle)
                if waiter.done:
                    return True
                if time.monotonic() >= deadline:
                    return False
                pause = min(1.0, pause * 2)
        finally:
            cell.running = running
            with self._lock:
                self._waits.end(number)
                self._stuck.pop(number, None)

    def _requests(self, cell: Cell, call: m.Call, waiter: Any) -> tuple[list[Request], Callable[[Request], str]]:
        """What an actor waits for, as requests to other actors, and what to say of each."""
        actor = getattr(waiter, "actor", "")
        if not actor:
            return [], str
        port, label = waiter.port, waiter.label
        requests = [Request(self._runtime.proc, port, peer.proc, actor) for peer in waiter.waits_for()]
        return requests, lambda _: f"{cell.title()}.{call.method}() waits for {label}"

    def _state_of(self, request: Request) -> Any:
        cell = self._runtime.actors.get(request.actor)
        return cell.state_of(request.proc, request.port) if cell is not None else None

    def _send_probes(self, probes: list[Probe]) -> None:
        for probe in probes:
            body = (*probe[:4], tuple(probe.request), probe.path)
            self._runtime.peer(probe.request.target).send(m.encode(m.Probe(probe.request.target, body)))

    def on_probe(self, message: m.Probe) -> None:
        """Takes a probe of another process."""
        proc, actor, wait, round_, request, path = message.body
        with self._lock:
            probes, deadlock = self._waits.receive(Probe(proc, actor, wait, round_, Request(*request), tuple(path)))
            blocked = self._stuck.get(deadlock.wait) if deadlock is not None else None
            if blocked is not None and deadlock is not None:
                blocked.circle = deadlock.message()
        if blocked is not None:
            self._runtime.pump.notify(cast("Waiter", blocked))
        self._send_probes(probes)


class _Blocked:
    """Waits for what an actor waits for, and for the news that it waits in a circle."""

    __slots__ = ("_waiter", "cell", "circle")

    def __init__(self, waiter: Future[Any], cell: Cell) -> None:
        self._waiter = waiter
        self.cell = cell
        self.circle: str | None = None

    @property
    def done(self) -> bool:
        return self.circle is not None or self._waiter.done

    @property
    def thread(self) -> Any:
        return self._waiter.thread

    @thread.setter
    def thread(self, turn: Any) -> None:
        # What completes the one wakes the thread that waits for both.
        self._waiter.thread = turn
