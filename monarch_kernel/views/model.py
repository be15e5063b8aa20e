"""The content of a view of a mesh, and its changes: functions of the state of the mesh alone."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

from monarch._kernel_api import MeshModel, Series, Span
from monarch_kernel.views.protocol import (
    MOST_SPANS,
    SPAN_SECONDS,
    Action,
    MeshRow,
    Patch,
    Points,
    Snapshot,
    SpanRow,
)
from monarch_kernel.views.rows import bar_row, call_row, mesh_row, points_of, rank_row, span_row

MOST_POINTS = 100_000
"""Points of all metrics in one message; beyond it, they are thinned out evenly."""


class _Sent(NamedTuple):
    """How much of a series the view has."""

    stride: int
    logged: int
    """Values that had been logged."""
    firm: int
    """Values of the series that stay, and that the view has."""
    at: int
    """How many points they are in the view."""
    runs: int


class Seen(NamedTuple):
    """The state that a view has been sent."""

    number: int
    mesh: MeshRow
    calls: frozenset[int]
    bars: frozenset[str]
    series: dict[tuple[str, int], _Sent]

    def fits(self, model: MeshModel) -> bool:
        """Return whether a patch can bring the view up to date; otherwise it needs a snapshot."""
        hosts = [rank.host for rank in model.ranks]
        shape = [*model.labels], [*model.sizes], hosts
        same = shape == (self.mesh.labels, self.mesh.sizes, self.mesh.hosts)
        return same and self.series.keys() <= model.series.keys()


def snapshot(model: MeshModel, uid: str, actions: list[Action], now: float) -> tuple[Snapshot, Seen]:
    """Return everything that a view shows, and what it has been sent then.

    Args:
        model: state of the mesh.
        uid: the uid of the mesh.
        actions: that the view offers.
        now: seconds since the epoch.
    """
    row = mesh_row(uid, model, actions)
    points, sent = _points(model, {}, -1)
    shown = Snapshot(
        now=now,
        number=model.number,
        mesh=row,
        ranks=[rank_row(rank, model.calls) for rank in model.ranks],
        calls=[call_row(call) for call in model.calls.values()],
        spans=_spans(model.spans, -1, now),
        points=points,
        bars=[bar_row(bar) for bar in model.bars.values()],
    )
    return shown, Seen(model.number, row, frozenset(model.calls), frozenset(model.bars), sent)


def patch(model: MeshModel, seen: Seen, now: float) -> tuple[Patch, Seen]:
    """Return what has changed since, for a view whose state fits, and what it has been sent then."""
    row = mesh_row(seen.mesh.uid, model, seen.mesh.actions)
    after = seen.number
    points, sent = _points(model, seen.series, after)
    changes = Patch(
        uid=row.uid,
        now=now,
        after=after,
        number=model.number,
        mesh=row if row != seen.mesh else None,
        ranks=[rank_row(rank, model.calls) for rank in model.ranks if rank.changed > after],
        calls=[call_row(call) for call in model.calls.values() if call.changed > after],
        spans=_spans(model.spans, after, now),
        points=points,
        bars=[bar_row(bar) for bar in model.bars.values() if bar.changed > after],
        dropped_calls=sorted(seen.calls - model.calls.keys()),
        dropped_bars=sorted(seen.bars - model.bars.keys()),
    )
    return changes, Seen(model.number, row, frozenset(model.calls), frozenset(model.bars), sent)


def _spans(spans: list[Span], after: int, now: float) -> list[SpanRow]:
    """Return the rows of spans that changed after a number, with the bounds of a view."""
    rows = [span_row(span) for span in spans if span.changed > after]
    return recent_spans(rows, now)


def recent_spans(rows: Iterable[SpanRow], now: float) -> list[SpanRow]:
    """Return the spans that a view keeps: all that last, and the newest of those that have ended.

    Of two of a rank that begin at the same time, the later one counts.
    """
    by_place = {(row.rank, row.begin): row for row in rows}
    lasting = [row for row in by_place.values() if not row.end]
    ended = [row for row in by_place.values() if row.end and row.end >= now - SPAN_SECONDS]
    if len(ended) > MOST_SPANS:
        ended = nlargest(MOST_SPANS, ended, key=lambda row: (row.end, row.begin, row.rank))
    return sorted([*ended, *lasting], key=lambda row: (row.begin, row.rank))


def _points(
    model: MeshModel, sent: dict[tuple[str, int], _Sent], after: int
) -> tuple[list[Points], dict[tuple[str, int], _Sent]]:
    """Return the points that a view lacks, and what it has of each series then."""
    changed = {key: series for key, series in model.series.items() if series.changed > after or key not in sent}
    parts = {key: _start(series, sent.get(key)) for key, series in changed.items()}
    every = 1 + sum(len(changed[key].values) - start for key, (start, _) in parts.items()) // MOST_POINTS
    points: list[Points] = []
    newest = dict(sent)
    for key, (start, at) in parts.items():
        series = changed[key]
        firm = len(series.values) - series.loose
        places = [*range(start, firm, every)]
        newest[key] = _Sent(series.stride, series.seen, firm, at + len(places), series.runs)
        points.append(points_of(series, [*places, firm] if series.loose else places, at))
    return points, newest


def _start(series: Series, sent: _Sent | None) -> tuple[int, int]:
    """Return the first value of a series that a view lacks, and how many points it keeps before it."""
    if sent is None or (series.stride, series.runs) != (sent.stride, sent.runs) or series.seen < sent.logged:
        return 0, 0
    return sent.firm, sent.at
