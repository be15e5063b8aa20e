"""The state of a mesh as its events tell it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from monarch._core.telemetry.events import Collective, RankState, ResourceUsage


@dataclass(slots=True)
class RankModel:
    """One rank."""

    rank: int
    host: str = ""
    state: RankState = RankState.STARTING
    since: float = 0.0
    """When it came into this state."""
    reason: str = ""
    """Why it failed or is silent; empty otherwise."""
    pid: int = 0
    device: str = ""
    restarts: int = 0
    calls: list[int] = field(default_factory=list[int])
    """Numbers of the calls that it owes an answer, oldest first."""
    place: str = ""
    queue: int = 0
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    collective: Collective | None = None
    tensors: dict[str, int] = field(default_factory=dict[str, int])
    changed: int = 0
    """Number of the newest entry that concerns it."""
    reported: RankState = RankState.IDLE
    """The state of its last report, which deaths and silence outweigh."""
    silent: bool = False
    fresh: bool = False
    """Whether it is a replacement that has not run a call."""


@dataclass(slots=True)
class CallModel:
    """A cell or call."""

    call: int
    title: str
    cell: int
    ranks: tuple[int, ...]
    started: float
    left: set[int]
    """Ranks that have not answered."""
    ended: float = 0.0
    """0 while ranks are left."""
    errors: dict[int, str] = field(default_factory=dict[int, str])
    """By rank, the first line of its error; those that were only stopped have none here."""
    stopped: set[int] = field(default_factory=set[int])
    """Ranks that were ended from outside: by an interrupt, or because other ranks had failed."""
    waits: str = ""
    """Why its ranks wait, for long; empty if they do not, or it is not known."""
    changed: int = 0


@dataclass(slots=True)
class Span:
    """Time that a rank spent in one state."""

    rank: int
    state: RankState
    begin: float
    end: float
    """0 if it lasts."""
    title: str
    """Of the call that it ran; empty for none."""
    changed: int = 0


@dataclass(slots=True)
class Series:
    """The values of a metric on one rank, by step; thinned out evenly beyond a bound.

    A value with an earlier step than the last one takes the place of all from that step on.
    """

    name: str
    rank: int
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    changed: int = 0
    stride: int = 1
    """Every how many values one is kept; the newest is always the last, and NaN and infinities are kept."""
    seen: int = 0
    loose: bool = False
    """Whether the last value gives way to the next one."""
    runs: int = 0
    """How often a value had an earlier step than the last one."""


@dataclass(slots=True)
class BarModel:
    """Progress of one piece of work."""

    bar: str
    unit: str
    done: dict[int, float] = field(default_factory=dict[int, float])
    """By rank; -1 for the mesh as a whole."""
    total: dict[int, float] = field(default_factory=dict[int, float])
    ranks: tuple[int, ...] = ()
    """Those that work of the mesh as a whole is on; none for all."""
    started: float = 0.0
    ended: set[int] = field(default_factory=set[int])
    over: float = 0.0
    """When the last rank ended; 0 while one continues."""
    changed: int = 0


@dataclass(slots=True)
class MeshModel:
    """A mesh, folded from its events: see ``fold``."""

    name: str = ""
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    started: float = 0.0
    ended: float = 0.0
    """0 while it lives."""
    reason: str = ""
    """Why it ended."""
    ranks: list[RankModel] = field(default_factory=list[RankModel])
    calls: dict[int, CallModel] = field(default_factory=dict[int, CallModel])
    """All that run, and the last ones that have ended."""
    spans: list[Span] = field(default_factory=list[Span])
    """Of the last minute."""
    series: dict[tuple[str, int], Series] = field(default_factory=dict[tuple[str, int], Series])
    """By metric and rank."""
    bars: dict[str, BarModel] = field(default_factory=dict[str, BarModel])
    number: int = 0
    """Of the newest entry that was folded in; 0 for none."""
    skipped: int = 0
    """Short calls that were not listed."""
    open_spans: dict[int, Span] = field(default_factory=dict[int, Span])
    """By rank, the one of ``spans`` that lasts."""
    ended_calls: deque[int] = field(default_factory=deque[int])
    """Those of ``calls`` that have ended, oldest first."""
    pruned: float = 0.0
    """When old spans were last dropped."""
