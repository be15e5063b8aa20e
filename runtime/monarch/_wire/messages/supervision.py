"""Deaths of processes, faults of actors, and broken connections."""

from __future__ import annotations

from monarch._core.causes import Cause, CellRef
from monarch._core.text.causes import describe
from monarch._wire.messages.base import Message

INTERNAL = "@internal"
"""In place of an actor in a Fault: a process could not handle a message, and nobody waits for an answer to it."""


class Watch(Message, tag=8):
    """Asks an agent to report the death of a proc."""

    src: str
    proc: str


class Dead(Message, tag=9):
    """A proc has ended, or never existed."""

    proc: str
    cause: Cause
    expected: bool
    tails: list[tuple[str, int, bytes]]
    """The end of its output: stream, offset, bytes."""
    when: float = 0.0
    """Seconds since the epoch when its agent learned of it; 0 if unknown."""
    at: CellRef | None = None
    """The line of the notebook cell that it ran; None if none."""
    since: int = 0
    """Offset in stderr at which its last cell began; 0 if it ran none."""
    quiet: float = 0.0
    """Seconds from its last output to stderr to its end; 0 if unknown."""

    @property
    def reason(self) -> str:
        """Return the predicate, as in ``exited with code 3 at cell [2] line 1``."""
        return describe(self.cause, self.at)


class Fault(Message, tag=10):
    """Reports to the owner that an actor failed, when no answer could."""

    src: str
    actor: str
    """Key of the actor, or INTERNAL."""
    rank: int
    body: bytes
    """A packed Failure."""


class Parted(Message, tag=27):
    """The connection between two hosts broke: from the agent of one to the program."""

    src: str
    host: str
    """The host of the sender."""
    other: str
    harmless: bool = False
    """Whether nothing between ranks of the two was on it, so that nothing is lost and it may be made again."""
