"""Sentences about the calls that a cell waits for: many of a kind are one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from monarch._kernel_api import describe_ranks, duration_text, format_ranks, stops
from monarch_kernel.calls.record import CallRecord, EarlierCall

_NAMED = 3
"""The most calls that a line names."""


class _Kind(Enum):
    HANDLE = auto()
    """A cell whose end the notebook does not wait for."""
    LEFT = auto()
    """A Stop did not end it."""
    CLEANING = auto()
    """It was stopped, and cleans up."""
    STOPPABLE = auto()
    """A Stop of the cell that waits stops it too."""
    OTHER = auto()


def wait_lines(calls: CallRecord, ahead: Iterable[EarlierCall]) -> list[str]:
    """Describe why a cell waits, and what a Stop does about it: one line for each kind of earlier call.

    Args:
        calls: the calls of the notebook.
        ahead: the earlier calls, oldest first.
    """
    kinds: dict[_Kind, list[EarlierCall]] = {}
    for each in ahead:
        kinds.setdefault(_kind(calls, each), []).append(each)
    return [_line(calls, kind, group) for kind, group in kinds.items()]


def unended_lines(calls: CallRecord) -> list[str]:
    """Describe the calls that still run though no notebook cell waits for them."""
    kinds: dict[tuple[_Kind, frozenset[str]], list[EarlierCall]] = {}
    for each in calls.unended():
        kinds.setdefault((_kind(calls, each), each.procs), []).append(each)
    lines: list[str] = []
    for (kind, _), group in kinds.items():
        where, one = describe_ranks(group[0].ranks), len(group) == 1
        title = titles_text(calls, group)
        match kind:
            case _Kind.HANDLE if one:
                lines.append(f"{title} is still running on {where}; {calls.handle(group[0].call)}.cancel() ends it")
            case _Kind.HANDLE:
                ends = f"call .cancel() on a handle ({_handles(calls, group)}) to end its cell"
                lines.append(f"{title} are still running on {where}; {ends}")
            case _Kind.LEFT:
                have = "was stopped but is" if one else "were stopped but are"
                lines.append(f"{title} {have} still running on {where}")
            case _Kind.CLEANING:
                are = "is still in its" if one else "are still in their"
                lines.append(f"{title} {are} except or finally code on {where}")
            case _:
                pass
    return lines


def titles_text(calls: CallRecord, ahead: Sequence[EarlierCall]) -> str:
    """Name earlier calls: the first ones, and of many the cells and the count of the others."""
    titles = dict.fromkeys(calls.title(each.call) for each in ahead)
    if len(titles) <= _NAMED:
        return ", ".join(titles)
    first = next(iter(titles))
    others = [each for each in ahead if calls.title(each.call) != first]
    cells = {number for each in others if (number := calls.cell_of(each.call.port))}
    of = f" from cell{'s' if len(cells) > 1 else ''} {format_ranks(cells)}" if cells else ""
    return f"{first} and {len(titles) - 1} more{of}"


def _kind(calls: CallRecord, each: EarlierCall) -> _Kind:
    if calls.handle(each.call):
        return _Kind.HANDLE
    if calls.has_left(each):
        return _Kind.LEFT
    if any(calls.is_cleaning(each.call.port, proc) for proc in each.procs):
        return _Kind.CLEANING
    return _Kind.STOPPABLE if calls.is_stoppable(each.call) else _Kind.OTHER


def _line(calls: CallRecord, kind: _Kind, group: Sequence[EarlierCall]) -> str:
    ranks = {rank for each in group for rank in each.ranks}
    waits = f"{describe_ranks(ranks)}: waiting for {titles_text(calls, group)}"
    one = len({calls.title(each.call) for each in group}) == 1
    are, them = ("is", "it") if one else ("are", "them")
    match kind:
        case _Kind.HANDLE if one:
            handle = calls.handle(group[0].call)
            return f"{waits}, {_state(group, True)}; {handle}.cancel() ends the cell"
        case _Kind.HANDLE:
            ends = f"call .cancel() on a handle ({_handles(calls, group)}) to end its cell"
            return f"{waits}, {_state(group, True)}; {ends}"
        case _Kind.LEFT:
            return (
                f"{waits}, which {'was' if one else 'were'} stopped but {are} still running; Stop ends only this wait; "
                f"%mesh kill kills {'it' if len(ranks) == 1 else 'them'} (variables and actor state are lost)"
            )
        case _Kind.CLEANING:
            return f"{waits}, still in {'its' if one else 'their'} except or finally code; Stop aborts {them}"
        case _:
            seconds = max(calls.seconds(each.call) for each in group)
            since = f" after {duration_text(seconds)}" if seconds >= 1 else ""
            stop = f"; Stop ends {them} too" if kind is _Kind.STOPPABLE else ""
            return f"{waits}, {_state(group)}{since}{stop}"


def _state(group: Sequence[EarlierCall], lasts: bool = False) -> str:
    """Return what earlier calls do, and for calls that outlast a Stop of the cell that waits, what it is good for."""
    procs = {proc for each in group for proc in each.procs}
    if procs and procs <= stops().now.keys() | stops().paused.keys():
        return "paused; Stop ends only this wait, so that you can run %mesh resume" if lasts else "paused"
    return "still running; Stop ends only this wait" if lasts else "still running"


def _handles(calls: CallRecord, group: Sequence[EarlierCall]) -> str:
    handles = [calls.handle(each.call) for each in group]
    return ", ".join(handles) if len(handles) <= _NAMED else f"{handles[0]}, ..., {handles[-1]}"
