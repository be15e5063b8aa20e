"""Events of a node: the rooms above subscribe, and the node knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._core.events import Event
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell_error


class NodeEvents:
    """The events of one process. Subscribers run in the receiving thread unless noted otherwise."""

    def __init__(self) -> None:
        self.dying: Event[[m.Dead]] = Event(tell_error)
        """A peer died; told before any other thread can see it."""
        self.lost: Event[[m.Dead]] = Event(tell_error)
        """A peer died unexpectedly; told after the calls that waited for it have failed."""
        self.proc_died: Event[[str]] = Event(tell_error)
        """A peer died, by its proc id, expected or not."""
        self.died: Event[[m.Dead, list[str]]] = Event(tell_error)
        """A peer died, and the labels of the calls that waited for it; told last."""
        self.faulted: Event[[m.Fault]] = Event(tell_error)
        """An actor failed where no caller waited."""
        self.not_sent: Event[[Any, tuple[int, ...], str]] = Event(tell_error)
        """A broadcast could not be sent, and its caller has continued: mesh, base ranks, reason. In any thread."""
        self.ready: Event[[m.Ready]] = Event(tell_error)
        """A process that was started from here listens."""
        self.sent: Callable[[Any], None] = _nothing
        """Notes a call that was sent, in the sending thread. Set once. A function rather than an Event, which would
        cost each call more."""
        self.call_failed: Event[[int, int, str, bool]] = Event(tell_error)
        """A rank answered a call with an error: port of the call, base rank, first line of the error, and whether the
        call was only ended from outside, by an interrupt or because of other ranks."""
        self.call_waits: Event[[int, str]] = Event(tell_error)
        """Why ranks of a call wait was found, or is over: port of the call, and the reason; in the receiving thread."""
        self.healed: Event[[str, list[int]]] = Event(tell_error)
        """Dead processes were replaced: uid of their mesh and base ranks; in the thread that heals."""
        self.replaced: Event[[str, list[int], bool]] = Event(tell_error)
        """Processes were replaced without heal_mesh: uid of their mesh, base ranks, and whether subscribers may
        wait for calls to the mesh; in the thread that replaces."""
        self.tensors_failed: Event[[]] = Event(tell_error)
        """Distributed tensors have no value, and the ranks continue: told in a thread that may wait."""
        self.controller_changed: Event[[]] = Event(tell_error)
        """Another program controls this process from now on."""
        self.interrupted: Event[[Any]] = Event(tell_error)
        """A KeyboardInterrupt ends a thread's wait for this future; in that thread."""
        self.closing: Event[[]] = Event(tell_error)
        """The node closes; told in the thread that closes it."""


def _nothing(_: Any) -> None:
    pass
