"""Messages to actors and processes that ask for something."""

from __future__ import annotations

from typing import Any

from monarch._wire.messages.base import Message, PackedBulk


class Call(Message, tag=2):
    """A message to an actor, the same to all addressed members."""

    src: str
    """Proc that sent it."""
    actor: str
    """Key of the actor mesh; ``@`` is the proc itself."""
    method: str
    port: int
    """Port of the answer at the sender; 0 if nobody waits for one."""
    view: bytes
    """The packed region that was addressed; each receiver finds its own place in it."""
    sender: str
    """Key of the sending actor, empty for a program."""
    flags: int
    body: bytes
    bulk: PackedBulk | None = None
    frames: int = 0
    cost: int = 1
    """Its cost in the sender's window, returned when it is finished."""


class Create(Message, tag=21):
    """Creates an actor in a proc."""

    src: str
    actor: str
    port: int
    view: bytes
    body: bytes
    """The pickled spec of the actor."""
    bulk: PackedBulk | None = None
    frames: int = 0


class Halt(Message, tag=22):
    """Stops an actor once it has handled earlier messages; with an empty key, all actors and the proc."""

    src: str
    actor: str
    port: int
    view: bytes
    reason: str
    drain: float | None = None
    """Seconds for earlier messages; None for the receiver's own limit."""


class Ask(Message, tag=24):
    """Asks a process for a named service, whatever its actors do; answered by a Reply."""

    src: str
    port: int
    view: bytes
    service: str
    body: bytes


class Probe(Message, tag=11):
    """See monarch._core.deadlock."""

    dst: str
    body: tuple[Any, ...]
