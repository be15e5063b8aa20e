"""Causes: why a process ended, or why messages do not reach it. Typed values; one function turns them into sentences.

``monarch._core.text.causes.describe`` makes the sentences. Code that needs to know what happened compares types and
reads fields. Causes are sent as they are, in a ``Dead``; docs/wire-protocol.md lists their tags.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class CellRef(msgspec.Struct, frozen=True, array_like=True):
    """A line of a notebook cell."""

    number: int
    """Execution count of the cell, as the notebook shows it."""
    line: int
    """From 1."""


class _Cause(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Exited(_Cause, frozen=True, array_like=True, tag=0):
    """The process exited by itself."""

    code: int


class Signaled(_Cause, frozen=True, array_like=True, tag=1):
    """A signal killed the process."""

    signal: int
    out_of_memory: bool = False
    """Whether the kernel's OOM killer was active at that moment."""
    full_shm: str = ""
    """Size of /dev/shm if it was full, which causes SIGBUS; otherwise empty."""


class Stopped(_Cause, frozen=True, array_like=True, tag=2):
    """The owner stopped the process, or shut it down."""


class Overdue(_Cause, frozen=True, array_like=True, tag=3):
    """The process was killed because it did not stop in time."""

    grace: float
    """Grace period in seconds."""


class NotStarted(_Cause, frozen=True, array_like=True, tag=4):
    """The process could not be started."""

    why: str


class NotReady(_Cause, frozen=True, array_like=True, tag=5):
    """The process was started but not ready in time."""

    seconds: float


class Unknown(_Cause, frozen=True, array_like=True, tag=6):
    """No process of this name was ever started on its host."""


class Orphaned(_Cause, frozen=True, array_like=True, tag=7):
    """The process was killed because its owner ended."""

    owner: str
    how: Cause
    """How the owner ended."""


class HostLost(_Cause, frozen=True, array_like=True, tag=8):
    """The connection to the host broke, so its processes are out of reach."""

    host: str


class HostsParted(_Cause, frozen=True, array_like=True, tag=9):
    """The connection between two hosts broke, and the program dropped one of them."""

    lost: str
    kept: str


class AgentEnded(_Cause, frozen=True, array_like=True, tag=10):
    """The host agent ended, and with it all processes of its host."""

    how: Cause | None
    """How the agent ended; None if unknown."""
    tail: str = ""
    """The last line that the agent wrote to stderr."""


class NotInSession(_Cause, frozen=True, array_like=True, tag=11):
    """The host is not in the session of the sender."""


class NotAttached(_Cause, frozen=True, array_like=True, tag=12):
    """This program has not attached the host."""

    host: str


class Detached(_Cause, frozen=True, array_like=True, tag=13):
    """The program of a detached mesh ended or lost its connection; the mesh waits for another program."""

    mesh: str


class Refused(_Cause, frozen=True, array_like=True, tag=14):
    """The process rejects messages, for example those of another protocol version."""

    why: str


class NotRestarted(_Cause, frozen=True, array_like=True, tag=15):
    """The process died, and its restart failed."""

    how: Cause
    """How the process died."""
    error: str
    """Why the restart failed."""


Cause: TypeAlias = (
    Exited
    | Signaled
    | Stopped
    | Overdue
    | NotStarted
    | NotReady
    | Unknown
    | Orphaned
    | HostLost
    | HostsParted
    | AgentEnded
    | NotInSession
    | NotAttached
    | Detached
    | Refused
    | NotRestarted
)
