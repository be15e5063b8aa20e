"""The spans of a model: what each rank did in the last minute."""

from __future__ import annotations

from dataclasses import replace

from monarch._core.telemetry.events import Entry, RankState
from monarch._core.telemetry.model import MeshModel, Span

KEPT_S = 60.0
"""Seconds for which ended spans are kept."""
MOST = 20_000
"""Spans that are kept in all."""
_FIRST = 1e-6
"""The earliest end of a span: 0 stands for none."""
_EVERY = 5.0
"""Seconds between two looks for old spans."""
_BLANK = (RankState.IDLE, RankState.STARTING, RankState.RESTARTED, RankState.STOPPED)
"""States without spans: nothing runs."""


def follow(model: MeshModel, rank: int, state: RankState, title: str, begin: float, entry: Entry) -> None:
    """End the span of a rank that lasts, and begin the next, if its state or what it runs has changed."""
    last = model.open_spans.get(rank)
    if last is None and state in _BLANK:
        return
    if last is not None:
        if last.state is state and last.title == title:
            return
        # A state that lasts while another call begins continues from here.
        begin = begin if last.state is not state and begin >= last.begin else entry.time
        last.end, last.changed = max(last.begin, begin, _FIRST), entry.number
        del model.open_spans[rank]
    if state not in _BLANK:
        span = model.open_spans[rank] = Span(rank, state, begin, 0.0, title, entry.number)
        model.spans.append(span)


def prune_spans(model: MeshModel, now: float) -> None:
    """Drop old spans, from time to time."""
    if len(model.spans) > MOST:
        kept = [each for each in model.spans if not each.end]
        model.spans = sorted([*[each for each in model.spans if each.end][MOST // 2 :], *kept], key=_begin)
    elif not model.pruned <= now < model.pruned + _EVERY:
        model.pruned = now
        model.spans = [each for each in model.spans if not each.end or each.end >= now - KEPT_S]


def _begin(span: Span) -> float:
    return span.begin


def copy_spans(model: MeshModel) -> tuple[list[Span], dict[int, Span]]:
    """Return copies of the spans, and of those that last, by rank."""
    copies = {id(each): replace(each) for each in model.spans}
    return list(copies.values()), {rank: copies[id(each)] for rank, each in model.open_spans.items()}
