"""The actors of one process, by the key of their mesh, and the messages that come for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Protocol, TypeVar

from monarch._actors.deadlocks import Deadlocks
from monarch._actors.ending import refuse
from monarch._actors.mailbox import Mailbox
from monarch._actors.running import current
from monarch._node.node import Node
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch._wire.receiving.loop import Waiter
from monarch.exceptions import ProtocolError

_EARLY_S = 5.0
"""Seconds that a message waits for the construction of its actor."""
H = TypeVar("H")


class Recipient(Protocol):
    """A part of the program that is addressed like an actor."""

    def deliver(self, call: m.Call, more: Sequence[Any], /) -> None:
        """Handle a message, in the receiving thread."""


class Actors:
    """The part of a node with its actors.

    ``on_create`` and ``on_halt`` are set once, before the process receives.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.here: dict[str, Mailbox] = {}
        """By key; single operations only, which are atomic."""
        self.others: dict[str, Recipient] = {}
        """Recipients that are not actors, by key. Set before the process receives."""
        self.gone: dict[str, str] = {}
        """Why each former actor was stopped, by key; grows only."""
        self._lock = RLock()
        self.early: dict[str, list[tuple[m.Call, Sequence[Any]]]] = {}
        """Messages that arrived before their actor was created; under ``_lock``."""
        self.interrupts = 0
        """The number of interrupted calls. Only changes matter, so there is no lock."""
        self.deadlocks = Deadlocks(node, self.here.get)
        self.on_create: Callable[[m.Create, Sequence[Any]], None] = _unexpected
        self.on_halt: Callable[[m.Halt], None] = _unexpected
        handle = node.dispatch.handle
        handle(m.Call, self._call)
        handle(m.Create, self._create)
        handle(m.Halt, lambda halt, _: self.on_halt(halt))
        handle(m.Probe, lambda probe, _: self.deadlocks.on_probe(probe))
        node.waits.watched_by(self)

    # Waits of actors

    def wait(self, waiter: Waiter, timeout: float | None) -> bool:
        """Wait in this thread. In an actor, a deadlock raises DeadlockError."""
        here = current.get()
        if here is None:
            return self._node.receive_loop.wait(waiter, timeout)
        return self.deadlocks.wait(here[0], here[1], waiter, timeout)

    def awaited(self, future: Any, arrival: asyncio.Future[Any]) -> None:
        """Note an await. In an actor, a deadlock raises DeadlockError."""
        here = current.get()
        if here is not None:
            self.deadlocks.awaited(here[0], here[1], future, arrival)

    # Messages, in the receiving thread

    def _call(self, call: m.Call, more: Sequence[Any]) -> None:
        mailbox = self.here.get(call.actor)
        if mailbox is None:
            self._unknown(call, more)
            return
        # The same as mailbox.deliver(), which would be one more call for each message.
        mailbox.queue.append(call)
        mailbox.executor.deliver(mailbox, call, more)
        if mailbox.left:
            mailbox.leave(mailbox.ending or "")

    def _unknown(self, call: m.Call, more: Sequence[Any]) -> None:
        """Refuse a message to a former actor; hold one for an actor that is not created yet."""
        other = self.others.get(call.actor)
        if other is not None:
            other.deliver(call, more)
            return
        with self._lock:
            mailbox = self.here.get(call.actor)
            if mailbox is None and call.actor not in self.gone:
                waiting = self.early.setdefault(call.actor, [])
                waiting.append((call, more))
                if len(waiting) == 1:
                    self._node.receive_loop.call_later(_EARLY_S, lambda: self._never_came(call.actor))
                return
        if mailbox is not None:
            mailbox.deliver(call, more)
        else:
            refuse(self._node, call, self.gone.get(call.actor))

    def _never_came(self, actor: str) -> None:
        for call, _ in self._take_early(actor):
            refuse(self._node, call, self.gone.get(actor))

    def _create(self, create: m.Create, more: Sequence[Any]) -> None:
        self.on_create(create, more)
        if self.early:
            for call, frames in self._take_early(create.actor):
                self._call(call, frames)

    def _take_early(self, actor: str) -> list[tuple[m.Call, Sequence[Any]]]:
        with self._lock:
            return self.early.pop(actor, [])


def actors_of(node: Node) -> Actors:
    """Return the actors of a process."""
    return node.part(Actors)


def _unexpected(*_: object) -> None:
    raise ProtocolError("this process does not accept messages of this kind")
