"""Events of a node: the rooms above subscribe, and the node knows none of them."""

from __future__ import annotations

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
        """A broadcast could not be sent, and its caller has gone on: mesh, base ranks, reason. In any thread."""
        self.controller_changed: Event[[]] = Event(tell_error)
        """Another program controls this process from now on."""
        self.closing: Event[[]] = Event(tell_error)
        """The node closes; told in the thread that closes it."""
