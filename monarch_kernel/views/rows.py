"""The rows of a view: parts of the state of a mesh as the messages write them."""

from __future__ import annotations

from math import isfinite

from monarch._kernel_api import BarModel, CallModel, Collective, MeshModel, RankModel, Series, Span
from monarch_kernel.views.protocol import Action, BarRow, CallRow, MeshRow, Points, RankRow, SpanRow

_DIGITS = 3
"""Of times, in a view."""
_WHOLE = -1
"""The rank of work of a mesh as a whole."""


def mesh_row(uid: str, model: MeshModel, actions: list[Action]) -> MeshRow:
    """Return the row of a mesh."""
    hosts = [rank.host for rank in model.ranks]
    times = _time(model.started), _time(model.ended)
    return MeshRow(uid, model.name, [*model.labels], [*model.sizes], hosts, *times, model.reason, actions)


def rank_row(rank: RankModel, calls: dict[int, CallModel]) -> RankRow:
    """Return the row of a rank.

    Args:
        rank: its state.
        calls: the calls of the mesh.
    """
    call = calls.get(rank.calls[0]) if rank.calls else None
    usage = rank.usage
    return RankRow(
        rank=rank.rank,
        state=rank.state.value,
        since=_time(rank.since),
        call=call.title if call is not None else "",
        place=rank.place,
        reason=rank.reason,
        collective=_collective_text(rank.collective),
        queue=rank.queue,
        pid=rank.pid,
        device=rank.device,
        restarts=rank.restarts,
        load=load_of(usage.gpu_load, usage.cpu),
        rss=usage.rss,
        gpu_memory=usage.gpu_memory,
        tensors=rank.tensors,
    )


def load_of(gpu: float, cpu: float) -> float:
    """Return the load of a rank: of its GPU if that is known, or else the share of one core."""
    return round(min(1.0, max(0.0, cpu if gpu < 0 else gpu)), 2)


def _collective_text(collective: Collective | None) -> str:
    if collective is None:
        return ""
    name = collective.name or "collective"
    return f"{name} #{collective.number}" if collective.number else name


def call_row(call: CallModel) -> CallRow:
    """Return the row of a call."""
    errors = {str(rank): text for rank, text in call.errors.items()}
    times = _time(call.started), _time(call.ended)
    return CallRow(
        call.call,
        call.title,
        call.cell,
        [*call.ranks],
        sorted(call.left),
        *times,
        errors,
        sorted(call.stopped),
        "" if call.ended else call.waits,
    )


def span_row(span: Span) -> SpanRow:
    """Return the row of a span."""
    return SpanRow(span.rank, span.state.value, _time(span.begin), _time(span.end), span.title)


def bar_row(bar: BarModel) -> BarRow:
    """Return the row of a bar, with how far each of its ranks has come."""
    together = _WHOLE in bar.done
    ranks = [_WHOLE] if together else sorted(bar.done)
    totals = [bar.total[rank] for rank in ranks]
    return BarRow(
        bar=bar.bar,
        unit=bar.unit,
        ranks=[*bar.ranks] if together else ranks,
        done=[bar.done[rank] for rank in ranks],
        total=totals[:1] if len(set(totals)) == 1 else totals,
        left=[] if together else sorted(bar.done.keys() - bar.ended),
        started=_time(bar.started),
        ended=_time(bar.over),
        together=together,
    )


def points_of(series: Series, places: list[int], at: int) -> Points:
    """Return the points of a series at some places.

    Args:
        series: the values of a metric on a rank.
        places: the places of the values.
        at: how many points the view keeps before these.
    """
    values = [_finite(series.values[place]) for place in places]
    return Points(series.name, series.rank, [series.steps[place] for place in places], values, at)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _time(seconds: float) -> float:
    return round(seconds, _DIGITS)
