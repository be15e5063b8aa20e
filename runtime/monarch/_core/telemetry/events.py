"""The events of a mesh: the entries of its log, from which every view is drawn.

A log numbers its entries from 1. Times are seconds since the epoch on the controller's clock.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec


class RankState(str, Enum):
    """States of a rank."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    COLLECTIVE = "collective"
    """It waits in a collective for other ranks."""
    BLOCKED = "blocked"
    """Its code is inside a C call and runs no Python."""
    PAUSED = "paused"
    UNRESPONSIVE = "unresponsive"
    """It has not answered for a while, or is suspended."""
    FAILED = "failed"
    """Its process has died unexpectedly."""
    RESTARTED = "restarted"
    """A new process has taken its place, and has not run anything yet."""
    STOPPED = "stopped"
    """Its process has ended as expected."""


class _Event(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


class MeshStarted(_Event, frozen=True, tag="mesh started"):
    """The processes of a mesh are being started, or the mesh has been resized."""

    name: str
    labels: tuple[str, ...]
    """Axes, outermost first."""
    sizes: tuple[int, ...]
    """Ranks along each axis."""
    hosts: tuple[str, ...]
    """Host of each rank."""


class MeshEnded(_Event, frozen=True, tag="mesh ended"):
    """The mesh was stopped."""

    reason: str


class RankStarted(_Event, frozen=True, tag="rank started"):
    """The process of a rank is ready."""

    rank: int
    pid: int
    restarts: int
    """How often its process was replaced."""


class RankDied(_Event, frozen=True, tag="rank died"):
    """The process of a rank has ended."""

    rank: int
    expected: bool
    reason: str
    """The predicate, as in ``exited with code 3 at cell [2] line 1``."""


class RankSilent(_Event, frozen=True, tag="rank silent"):
    """A rank does not answer, or answers again."""

    rank: int
    reason: str
    """Empty if it answers again."""


class CallStarted(_Event, frozen=True, tag="call started"):
    """The notebook or program has sent a cell or a call."""

    call: int
    """Its number, unique in the log."""
    title: str
    """As in ``cell [3]`` or ``Trainer.step``."""
    cell: int
    """Number of the notebook cell that sent it; 0 if none."""
    ranks: tuple[int, ...]


class CallAnswered(_Event, frozen=True, tag="call answered"):
    """Ranks have answered a call; it has ended when all of its ranks have."""

    call: int
    ranks: tuple[int, ...]
    error: str
    """First line of their error; empty if they have none."""
    stopped: bool = False
    """Whether they only were ended from outside: by an interrupt, or because of other ranks."""


class CallWaits(_Event, frozen=True, tag="call waits"):
    """Why ranks of a call wait has been found, or is over."""

    call: int
    reason: str
    """As in ``stuck: rank 0 waits for ranks 1-3, ...``; empty if they no longer wait."""


class CallsSkipped(_Event, frozen=True, tag="calls skipped"):
    """Short calls that the log does not list, because too many ended at once."""

    count: int


class ResourceUsage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Load of a process."""

    cpu: float = 0.0
    """Cores used since the last report."""
    rss: int = 0
    """Resident bytes."""
    gpu_memory: int = 0
    """Bytes that it holds on its GPU."""
    gpu_load: float = -1.0
    """Utilization of its GPU, from 0 to 1; negative if unknown."""


class Collective(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A collective that a rank waits in."""

    name: str
    """As in ``all_reduce``; empty if only its wait is known."""
    group: str
    number: int
    """Its sequence number in the group; 0 if unknown."""


class RankReport(_Event, frozen=True, tag="rank report"):
    """The report of a rank: sent on change, at most 10 times a second."""

    rank: int
    state: RankState
    place: str
    """Innermost line of user code, as in ``cell [3] line 5``; empty if none runs."""
    since: float
    """When it came into this state."""
    queue: int
    """Messages that wait in the mailboxes of its actors."""
    device: str
    usage: ResourceUsage
    collective: Collective | None = None
    tensors: dict[str, int] = {}
    """Bytes of tensors by owner: ``model`` (without gradients), ``optimizer``, or the name of another variable."""


class Metrics(_Event, frozen=True, tag="metrics"):
    """Values that a rank has logged with ``log_metric`` since its last report; a rank may log many at once."""

    rank: int
    """-1 for the notebook or program."""
    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    """As many as steps."""


class Progress(_Event, frozen=True, tag="progress"):
    """Work of a known length has advanced."""

    rank: int
    """-1 for work of the mesh as a whole."""
    bar: str
    """Its description, which identifies it on the rank."""
    done: float
    total: float
    """Not positive if unknown."""
    unit: str
    ended: bool
    ranks: tuple[int, ...] = ()
    """For the rank -1, those that the work is on; none for all of the mesh."""


class Diverged(_Event, frozen=True, tag="diverged"):
    """A watched tensor differs among ranks, or has NaN or Inf; see ``monarch.debug.watch``."""

    name: str
    """Of what is watched."""
    ranks: tuple[int, ...]
    step: int
    reason: str


Event: TypeAlias = (
    MeshStarted
    | MeshEnded
    | RankStarted
    | RankDied
    | RankSilent
    | CallStarted
    | CallAnswered
    | CallWaits
    | CallsSkipped
    | RankReport
    | Metrics
    | Progress
    | Diverged
)


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An event in a log."""

    number: int
    time: float
    event: Event
