"""The state of a mesh from the entries of its log: a function of the entries alone, in any order, that never raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from monarch._core.telemetry.events import (
    CallAnswered,
    CallsSkipped,
    CallStarted,
    CallWaits,
    Diverged,
    Entry,
    MeshEnded,
    MeshStarted,
    Metrics,
    Progress,
    RankDied,
    RankReport,
    RankSilent,
    RankStarted,
    RankState,
)
from monarch._core.telemetry.model import BarModel, CallModel, MeshModel, RankModel
from monarch._core.telemetry.series import add_values, copy_series
from monarch._core.telemetry.spans import copy_spans, follow, prune_spans

MOST_ENDED = 50
"""Ended calls that a model keeps."""
MOST_CALLS = 10_000
"""Calls that a model keeps in all."""
MOST_BARS = 200
OVER = (RankState.FAILED, RankState.STOPPED)
_BUSY = (RankState.RUNNING, RankState.COLLECTIVE, RankState.BLOCKED, RankState.PAUSED)


def fold(model: MeshModel, entry: Entry) -> None:
    """Fold an entry into a model, which nobody else reads meanwhile."""
    event = entry.event
    model.number = max(model.number, entry.number)
    _FOLDS[type(event)](model, event, entry)
    prune_spans(model, entry.time)


def copy_of(model: MeshModel) -> MeshModel:
    """Return a copy that does not change with the model."""
    spans, open_spans = copy_spans(model)
    return replace(
        model,
        ranks=[replace(each, calls=list(each.calls)) for each in model.ranks],
        calls={
            number: replace(each, left=set(each.left), errors=dict(each.errors), stopped=set(each.stopped))
            for number, each in model.calls.items()
        },
        spans=spans,
        series={key: copy_series(each) for key, each in model.series.items()},
        bars={
            name: replace(each, done=dict(each.done), total=dict(each.total), ended=set(each.ended))
            for name, each in model.bars.items()
        },
        open_spans=open_spans,
        ended_calls=model.ended_calls.copy(),
    )


# The mesh


def _mesh_started(model: MeshModel, event: MeshStarted, entry: Entry) -> None:
    model.name, model.labels, model.sizes = event.name, event.labels, event.sizes
    model.started = model.started or entry.time
    for rank in range(len(event.hosts), len(model.ranks)):
        _close_calls(model, rank, "left the mesh", entry, True)
        _show(model, model.ranks[rank], RankState.STOPPED, entry)
    del model.ranks[len(event.hosts) :]
    for rank, host in enumerate(event.hosts):
        if rank == len(model.ranks):
            model.ranks.append(RankModel(rank, since=entry.time, changed=entry.number))
        model.ranks[rank].host = host


def _mesh_ended(model: MeshModel, event: MeshEnded, entry: Entry) -> None:
    model.ended, model.reason = entry.time, event.reason
    for rank in model.ranks:
        _close_calls(model, rank.rank, event.reason, entry, True)
        if rank.state is not RankState.FAILED:
            _show(model, rank, RankState.STOPPED, entry)
    for bar in model.bars.values():
        _end_bar(bar, entry)


# Ranks


def _rank(model: MeshModel, rank: int, entry: Entry) -> RankModel | None:
    """Return a rank that an entry concerns; None if the mesh has none of this number."""
    if not 0 <= rank < len(model.ranks):
        return None
    found = model.ranks[rank]
    found.changed = entry.number
    return found


def _rank_started(model: MeshModel, event: RankStarted, entry: Entry) -> None:
    rank = _rank(model, event.rank, entry)
    if rank is None or model.ended:
        return
    if rank.pid and rank.pid != event.pid:
        # Nobody answers the calls to its former process.
        _close_calls(model, event.rank, "was replaced", entry)
    rank.pid, rank.restarts, rank.reason = event.pid, event.restarts, ""
    rank.silent, rank.fresh, rank.reported = False, event.restarts > 0, RankState.IDLE
    _clear(rank)
    _settle(model, rank, entry, revive=True)


def _rank_died(model: MeshModel, event: RankDied, entry: Entry) -> None:
    rank = _rank(model, event.rank, entry)
    if rank is None:
        return
    rank.reason, rank.silent = event.reason, False
    _clear(rank)
    rank.usage = type(rank.usage)()
    _close_calls(model, event.rank, event.reason, entry)
    _show(model, rank, RankState.STOPPED if event.expected else RankState.FAILED, entry)


def _rank_silent(model: MeshModel, event: RankSilent, entry: Entry) -> None:
    rank = _rank(model, event.rank, entry)
    if rank is None or rank.state in OVER:
        return
    rank.silent, rank.reason = bool(event.reason), event.reason
    _settle(model, rank, entry)


def _reported(model: MeshModel, event: RankReport, entry: Entry) -> None:
    rank = _rank(model, event.rank, entry)
    if rank is None or rank.state in OVER:
        return
    rank.place, rank.queue, rank.usage = event.place, event.queue, event.usage
    rank.collective, rank.tensors = event.collective, event.tensors
    rank.device = event.device or rank.device
    rank.reported = event.state
    _settle(model, rank, entry, event.since)


def _clear(rank: RankModel) -> None:
    rank.place, rank.queue, rank.collective = "", 0, None


def _settle(model: MeshModel, rank: RankModel, entry: Entry, since: float = 0.0, revive: bool = False) -> None:
    """Show the state of a rank that follows from all that is known of it."""
    if rank.state in OVER and not revive:
        return
    state = rank.reported
    if rank.silent:
        state = RankState.UNRESPONSIVE
    elif not rank.pid:
        state = RankState.STARTING
    elif state not in _BUSY and rank.calls:
        state = RankState.RUNNING
    elif state not in _BUSY:
        state = RankState.RESTARTED if rank.fresh else RankState.IDLE
    _show(model, rank, state, entry, since)


def _show(model: MeshModel, rank: RankModel, state: RankState, entry: Entry, since: float = 0.0) -> None:
    title = ""
    if rank.calls and state not in OVER:
        call = model.calls.get(rank.calls[0])
        title = call.title if call is not None else ""
    if state is not rank.state:
        # A report tells when the state began, but not earlier than the one before it.
        begin = since if rank.since <= since <= entry.time else entry.time
        rank.state, rank.since, rank.changed = state, begin, entry.number
    elif state is RankState.PAUSED and rank.since < since <= entry.time:
        # A pause after a step: it is as old as the last stop.
        rank.since, rank.changed = since, entry.number
    follow(model, rank.rank, state, title, rank.since, entry)


# Calls


def _call_started(model: MeshModel, event: CallStarted, entry: Entry) -> None:
    if event.call in model.calls:
        return
    ranks = tuple(rank for rank in dict.fromkeys(event.ranks) if 0 <= rank < len(model.ranks))
    left = {rank for rank in ranks if model.ranks[rank].state not in OVER}
    call = CallModel(event.call, event.title, event.cell, ranks, entry.time, left, changed=entry.number)
    model.calls[event.call] = call
    for number in sorted(left):
        rank = model.ranks[number]
        rank.calls.append(event.call)
        rank.fresh, rank.changed = False, entry.number
        _settle(model, rank, entry)
    _ended_if_none_left(model, call, entry)
    if len(model.calls) > MOST_CALLS:
        _forget_call(model, next(iter(model.calls)), entry)


def _call_answered(model: MeshModel, event: CallAnswered, entry: Entry) -> None:
    call = model.calls.get(event.call)
    if call is not None:
        for rank in event.ranks:
            _answered(model, call, rank, event.error, entry, event.stopped)
        _ended_if_none_left(model, call, entry)


def _answered(model: MeshModel, call: CallModel, number: int, error: str, entry: Entry, stopped: bool = False) -> None:
    if number not in call.left:
        return
    call.left.discard(number)
    call.changed = entry.number
    if stopped:
        call.stopped.add(number)
    elif error:
        call.errors[number] = error
    rank = model.ranks[number]
    rank.calls.remove(call.call)
    rank.changed = entry.number
    # Its next report may still say otherwise.
    rank.reported = RankState.IDLE
    if not rank.calls:
        _clear(rank)
    _settle(model, rank, entry)


def _close_calls(model: MeshModel, number: int, error: str, entry: Entry, stopped: bool = False) -> None:
    """Count a rank that is gone as having answered."""
    for key in list(model.ranks[number].calls):
        call = model.calls[key]
        _answered(model, call, number, error, entry, stopped)
        _ended_if_none_left(model, call, entry)


def _ended_if_none_left(model: MeshModel, call: CallModel, entry: Entry) -> None:
    if call.left or call.call in model.ended_calls:
        return
    call.ended, call.changed = entry.time, entry.number
    model.ended_calls.append(call.call)
    if len(model.ended_calls) > MOST_ENDED:
        del model.calls[model.ended_calls.popleft()]


def _forget_call(model: MeshModel, key: int, entry: Entry) -> None:
    call = model.calls[key]
    for number in sorted(call.left):
        _answered(model, call, number, "", entry)
    if key in model.ended_calls:
        model.ended_calls.remove(key)
    del model.calls[key]


def _call_waits(model: MeshModel, event: CallWaits, entry: Entry) -> None:
    call = model.calls.get(event.call)
    if call is not None:
        call.waits, call.changed = event.reason, entry.number


def _calls_skipped(model: MeshModel, event: CallsSkipped, _: Entry) -> None:
    model.skipped += event.count


# Metrics and progress


def _metrics(model: MeshModel, event: Metrics, entry: Entry) -> None:
    if -1 <= event.rank < len(model.ranks):
        add_values(model, event, entry.number)


def _progress(model: MeshModel, event: Progress, entry: Entry) -> None:
    if not -1 <= event.rank < len(model.ranks):
        return
    bar = model.bars.get(event.bar)
    if bar is None or (bar.done.keys() <= bar.ended and not event.ended):
        # All have ended: it begins again, as in the next epoch.
        model.bars.pop(event.bar, None)
        bar = model.bars[event.bar] = BarModel(event.bar, event.unit, started=entry.time)
    bar.done[event.rank], bar.total[event.rank] = event.done, event.total
    bar.unit, bar.ranks, bar.changed = event.unit, event.ranks, entry.number
    if event.ended:
        bar.ended.add(event.rank)
    else:
        bar.ended.discard(event.rank)
    bar.over = entry.time if bar.done.keys() <= bar.ended else 0.0
    if len(model.bars) > MOST_BARS:
        del model.bars[next(iter(model.bars))]


def _end_bar(bar: BarModel, entry: Entry) -> None:
    if not bar.done.keys() <= bar.ended:
        bar.ended.update(bar.done)
        bar.over, bar.changed = entry.time, entry.number


_FOLDS: dict[type, Callable[[MeshModel, Any, Entry], None]] = {
    MeshStarted: _mesh_started,
    MeshEnded: _mesh_ended,
    RankStarted: _rank_started,
    RankDied: _rank_died,
    RankSilent: _rank_silent,
    RankReport: _reported,
    CallStarted: _call_started,
    CallAnswered: _call_answered,
    CallWaits: _call_waits,
    CallsSkipped: _calls_skipped,
    Metrics: _metrics,
    Progress: _progress,
    # It is in the log only.
    Diverged: lambda model, event, entry: None,
}
