"""The activity of ranks: the facts from which a diagnosis is made. Plain values, which go over the wire."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from monarch._core.position import Frame


class Kind(str, Enum):
    """Kinds of things that code does or waits in."""

    COLLECTIVE = "collective"
    """A collective, a message to or from another rank, or the making of a group."""
    FUTURE = "future"
    """The answer of an actor, or a message at a port."""
    LOCK = "lock"
    EVENT = "event"
    """An event or a condition of ``threading``, or a barrier of threads."""
    QUEUE = "queue"
    THREAD = "thread"
    """The end of a thread, or work in a pool of threads or processes."""
    CHILD = "child"
    """A child process."""
    SOCKET = "socket"
    PIPE = "pipe"
    FILE = "file"
    SLEEP = "sleep"
    ASYNC = "async"
    """An ``await``."""
    GPU = "GPU"
    """The kernels that it has issued."""
    BROKEN = "broken"
    """A collective whose call has ended with the failure of another rank."""
    C_CODE = "C code"
    """C code that has released the GIL."""
    PYTHON = "Python"
    GIL = "GIL"
    """C code that holds the GIL, so the rank does not answer."""
    PAUSED = "paused"
    """By the debugger."""
    SUSPENDED = "suspended"
    """By a signal."""
    SILENT = "silent"
    """It does not answer; why is not known."""
    DEAD = "dead"
    IDLE = "idle"
    """No call runs there."""


class Unended(NamedTuple):
    """A collective that a rank has begun in a group, and that has not ended there."""

    order: int
    """How many collectives of the group the rank had begun with it, messages not counted."""
    number: int
    """How many operations of the group it had begun with it."""
    operation: str
    tensors: str
    """As in ``Entered``, like the next one."""
    is_alike: bool


class Entered(NamedTuple):
    """A collective that a rank has entered."""

    operation: str
    """Name of the torch function; empty if unknown."""
    group: str
    """torch's name of the process group."""
    members: tuple[int, ...]
    """Ranks of the group."""
    is_default: bool
    number: int
    """How many operations the rank has begun in the group; 0 while a group is made."""
    peers: tuple[int, ...] = ()
    """The peers of a point-to-point operation."""
    tensors: str = ""
    """Dtype and shape of its tensor, as in ``float32[2, 3]``; empty if unknown."""
    is_alike: bool = False
    """Whether all ranks must give the same dtype and shape."""
    reduction: str = ""
    """As in ``sum``; empty if it has none."""
    root: int = -1
    """Source or destination; -1 if it has none."""
    tag: int = 0
    is_message: bool = False
    """Whether it is a point-to-point operation, with or without known peers."""
    label: str = ""
    """The description of the group, or its number among the groups of the same ranks; empty if it needs none."""
    unended: tuple[Unended, ...] = ()
    """The collectives of the group that have not ended, in their order, if torch has recorded them."""


class Target(NamedTuple):
    """An actor that a call waits for."""

    uid: str
    """Of its process mesh."""
    rank: int
    actor: str
    """Key of its mesh."""


class FileLockHolder(NamedTuple):
    """A process that holds the lock on a file."""

    pid: int
    command: str
    """Empty if it is unknown."""


class Doing(NamedTuple):
    """The activity of one running call."""

    kind: Kind
    what: str = ""
    """In words, as in ``queue.Queue.get`` or ``a child process: sleep 600``; empty if the kind says it."""
    frames: tuple[Frame, ...] = ()
    """Of the user's code, innermost first."""
    seconds: float = 0.0
    """How long it has certainly been there."""
    cores: float = -1.0
    """CPU cores that the rank and its child processes have used since the last look; negative if unknown."""
    actor: str = ""
    """Key of the actor that runs the call."""
    title: str = ""
    """Of the call, as in ``trainer[gpus=1].step``."""
    entered: Entered | None = None
    targets: tuple[Target, ...] = ()
    advice: str = ""
    """Advice for the user, if it is particular to this rank."""
    is_deadlock: bool = False
    """Whether it waits for another thread of the rank that waits for it."""
    issued: tuple[Entered, ...] = ()
    """While it waits for its GPU: the last collective of each group that runs there, which may have ended."""
    children: tuple[str, ...] = ()
    """Where the child processes are that it may wait for, in words."""
    holders: tuple[FileLockHolder, ...] = ()
    """The processes that hold the lock on a file that it waits for, until it is known which of them are ranks."""


class RankFacts(NamedTuple):
    """The activity of a rank."""

    rank: int
    doings: tuple[Doing, ...] = ()
    """Of each running call; none if the rank is idle."""
    counts: tuple[tuple[str, int], ...] = ()
    """By name, for each process group: the operations that the rank has begun."""
    uid: str = ""
    """Of its process mesh."""


FORMING = "init_process_group"
"""The operation of a rank that waits until all ranks have formed the default group. They need not call anything for it;
their processes have to answer."""
ANSWERLESS = frozenset({Kind.GIL, Kind.SUSPENDED, Kind.SILENT, Kind.DEAD})
"""Kinds of ranks whose process does not answer."""
COMPUTES = frozenset({Kind.PYTHON, Kind.C_CODE})
"""Kinds that end by themselves, as far as can be seen."""
