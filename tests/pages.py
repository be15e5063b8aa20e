"""Events of meshes for the tests of views, and a view as the browser has it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from monarch._core.telemetry import events as ev
from monarch._core.telemetry.fold import fold
from monarch._core.telemetry.model import MeshModel
from monarch_kernel.views.model import recent_spans
from monarch_kernel.views.protocol import FromKernel, Patch, Snapshot

RANKS = 4
_ranks = st.integers(0, RANKS - 1)
_some = st.lists(_ranks, min_size=1, max_size=RANKS, unique=True).map(tuple)
_calls = st.integers(1, 8)
_seconds = st.floats(0, 5)
_texts = st.sampled_from(["", "exited with code 3", "no answer for 5 s"])
_values = st.floats(allow_nan=True, width=32)

_SIZES = {2: (2,), RANKS: (2, 2)}


def started(ranks: int = RANKS) -> ev.MeshStarted:
    """The start of a mesh of two hosts, or of one of two ranks."""
    labels = ("gpus",) if ranks == 2 else ("hosts", "gpus")
    return ev.MeshStarted("mesh", labels, _SIZES[ranks], tuple(f"host{rank // 2}" for rank in range(ranks)))


reports = st.builds(
    ev.RankReport,
    rank=_ranks,
    state=st.sampled_from(ev.RankState),
    place=st.sampled_from(["", "cell [1] line 2"]),
    since=st.just(0.0),
    queue=st.integers(0, 3),
    device=st.just("cpu"),
    usage=st.builds(ev.ResourceUsage, cpu=st.floats(0, 4), rss=st.integers(0, 1 << 40)),
    collective=st.none() | st.just(ev.Collective("all_reduce", "world", 12)),
)
metrics = st.builds(
    lambda rank, name, values: ev.Metrics(rank, name, tuple(range(len(values))), tuple(values)),
    st.integers(-1, RANKS - 1),
    st.sampled_from(["loss", "accuracy"]),
    st.lists(_values, min_size=1, max_size=400),
)
events = st.one_of(
    st.builds(ev.CallStarted, _calls, st.just("cell [1]"), st.integers(0, 3), _some),
    st.builds(ev.CallWaits, _calls, st.sampled_from(["", "stuck: rank 0 waits for rank 1"])),
    st.builds(ev.CallAnswered, _calls, _some, st.sampled_from(["", "ValueError: x"])),
    reports,
    metrics,
    st.builds(ev.RankStarted, _ranks, st.integers(1, 9), st.integers(0, 2)),
    st.builds(ev.RankDied, _ranks, st.booleans(), _texts),
    st.builds(ev.RankSilent, _ranks, _texts),
    st.builds(
        ev.Progress, st.integers(-1, RANKS - 1), st.sampled_from(["epoch", "load"]), st.floats(0, 10),
        st.sampled_from([0.0, 10.0]), st.just("it"), st.booleans(),
    ),
    st.builds(started, st.sampled_from(list(_SIZES))),
    st.just(ev.MeshEnded("%mesh down")),
)  # fmt: skip
histories = st.lists(st.tuples(events, _seconds, st.booleans()), max_size=40)
"""Events, the seconds before each, and whether a view looks after it."""


class Log:
    """Events that are folded as they come."""

    def __init__(self) -> None:
        self.model = MeshModel()
        self.now = 1000.0

    def begin(self, ranks: int = RANKS) -> Log:
        """Start a mesh whose ranks are ready."""
        self.add(started(ranks))
        for rank in range(ranks):
            self.add(ev.RankStarted(rank, 100 + rank, 0))
        return self

    def add(self, event: ev.Event, after: float = 0.0) -> None:
        """Add an event some seconds after the last one."""
        self.now += after
        fold(self.model, ev.Entry(self.model.number + 1, self.now, event))


class Page:
    """Output as the browser shows it, by the rules of the protocol."""

    def __init__(self) -> None:
        self.number = -1
        self.mesh: Any = None
        self.ranks: dict[int, Any] = {}
        self.calls: dict[int, Any] = {}
        self.spans: dict[tuple[int, float], Any] = {}
        self.bars: dict[str, Any] = {}
        self.points: dict[tuple[str, int], list[tuple[int, float | None]]] = {}

    def take(self, message: FromKernel) -> None:
        """Apply a message."""
        if isinstance(message, Patch) and self.number < 0:
            # For another page of the same widget; this one has not opened yet.
            return
        match message:
            case Snapshot():
                self.__init__()
                self.mesh = message.mesh
            case Patch():
                assert message.after == self.number
                self.mesh = message.mesh or self.mesh
                for call in message.dropped_calls:
                    del self.calls[call]
                for bar in message.dropped_bars:
                    del self.bars[bar]
            case _:
                return
        self.number = message.number
        self.ranks.update({row.rank: row for row in message.ranks})
        self.calls.update({row.call: row for row in message.calls})
        self.bars.update({row.bar: row for row in message.bars})
        self.spans.update({(row.rank, row.begin): row for row in message.spans})
        kept = recent_spans(self.spans.values(), message.now)
        self.spans = {(row.rank, row.begin): row for row in kept}
        for points in message.points:
            line = self.points.setdefault((points.name, points.rank), [])
            del line[points.at :]
            line += zip(points.steps, points.values, strict=True)

    def shown(self) -> Any:
        """Return all of it, to compare."""
        return self.number, self.mesh, self.ranks, self.calls, self.spans, self.bars, self.points
