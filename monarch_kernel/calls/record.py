"""Calls of the notebook: their cells, the calls they wait for, and those that Stop could not end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from monarch._kernel_api import Gather, Node, is_gather, meshes_of, methods_of, split_proc

_REMEMBERED = 2_000


class EarlierCall(NamedTuple):
    """An earlier unanswered call that later ones to the same actors wait for."""

    call: Gather[Any]
    procs: frozenset[str]

    @property
    def ranks(self) -> list[int]:
        """The ranks where it is ahead."""
        return sorted(split_proc(proc)[1] for proc in self.procs)


def ahead_of(node: Node, calls: Iterable[Gather[Any]]) -> list[EarlierCall]:
    """Return the calls that others wait for, oldest first: an actor handles calls of one sender in order.

    Args:
        node: the node of the notebook.
        calls: the waiting calls.
    """
    last: dict[str, int] = {}
    waiting: dict[str, set[str]] = {}
    for call in calls:
        if call.actor and not _is_concurrent(call):
            last[call.actor] = max(last.get(call.actor, 0), call.port)
            waiting.setdefault(call.actor, set()).update(peer.proc for peer in call.waits_for())
    ahead: list[EarlierCall] = []
    for each in list(node.ports.gathers.values()) if last else ():
        # Other gathers wait for deaths, or ask processes rather than actors.
        if not is_gather(each) or each.port >= last.get(each.actor, 0) or _is_concurrent(each):
            continue
        procs = waiting[each.actor].intersection(peer.proc for peer in each.waits_for())
        if procs:
            ahead.append(EarlierCall(each, frozenset(procs)))
    return ahead


def _is_concurrent(call: Gather[Any]) -> bool:
    cls = call.view._state.cls if call.view is not None else None
    method = methods_of(cls).get(call.method) if cls is not None else None
    return method is not None and method.concurrent


class CallRecord:
    """The notebook's record of its calls, by the port that awaits the answer.

    Args:
        node: the node of the notebook.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        # Single dict operations, by any thread.
        self._cells: dict[int, tuple[int, float]] = {}
        """The cell number of a call, and when it was made."""
        self._most = _REMEMBERED
        """How many are kept before finished ones are dropped."""
        self._names: dict[int, str] = {}
        """Names of calls that are cells."""
        self._handles: dict[int, str] = {}
        """Names of the handles of cells that the notebook does not wait for."""
        self._left: dict[int, set[str]] = {}
        """The processes where a call was stopped but has not ended."""
        self._cleaning: dict[int, set[str]] = {}
        """The processes where a stopped call was left to clean up; the next stop breaks that off."""
        self._stopping: dict[int, bool] = {}
        """The calls that a stop or a timeout ends, as keys."""

    def opened(self, port: int, cell: int) -> None:
        """Record a call that is made."""
        self._cells[port] = cell, time.monotonic()
        if len(self._cells) > self._most:
            self._forget()
            self._most = max(_REMEMBERED, 2 * len(self._cells))

    def _forget(self) -> None:
        gathers = self._node.ports.gathers
        for table in (self._cells, self._names, self._handles, self._left, self._cleaning, self._stopping):
            for port in [port for port in list(table) if port not in gathers]:
                table.pop(port, None)

    def name(self, calls: Iterable[Gather[Any]], name: str, handle: str = "") -> None:
        """Record that calls belong to a cell, which may have a handle."""
        for call in calls:
            self._names[call.port] = name
            if handle:
                self._handles[call.port] = handle

    def title(self, call: Gather[Any]) -> str:
        """Describe a call, and whether it is a cell that the notebook does not wait for."""
        return f"{self.short_title(call)}{' (--nowait)' if call.port in self._handles else ''}"

    def short_title(self, call: Gather[Any]) -> str:
        """Describe a call; a cell by its name."""
        name = self._names.get(call.port)
        if name is not None:
            return name
        cell, _ = self._cells.get(call.port, (0, 0.0))
        what = f"the constructor of {call.mesh}" if call.method == "__init__" else f"{call.label}"
        return f"{what}, called in cell [{cell}]" if cell else what

    def seconds(self, call: Gather[Any]) -> float:
        """Return how long ago a call was made; 0 if unknown."""
        _, begun = self._cells.get(call.port, (0, time.monotonic()))
        return time.monotonic() - begun

    def is_cell(self, call: Gather[Any]) -> bool:
        """Return whether a call is a cell rather than a call of an endpoint."""
        return call.port in self._names

    def ahead(self, calls: Iterable[Gather[Any]]) -> list[EarlierCall]:
        """Return the other calls that these wait for."""
        calls = list(calls)
        ports = {call.port for call in calls}
        return [each for each in ahead_of(self._node, calls) if each.call.port not in ports]

    def is_setup(self, call: Gather[Any]) -> bool:
        """Return whether a call prepares ranks for cells, whose progress the command that starts them shows."""
        cls = call.view._state.cls if call.view is not None else None
        return call.method == "__init__" and cls is not None and cls.__module__.startswith("monarch._notebook.")

    def is_stoppable(self, call: Gather[Any]) -> bool:
        """Return whether a Stop of waiting calls also ends this one: cells with a handle and constructors continue."""
        return not (self.handle(call) or _is_special(call))

    def runs_ops(self, call: Gather[Any]) -> bool:
        """Return whether a call runs ops on tensors, which end by themselves unless they are functions of the user."""
        return bool(call.actor) and _is_unstopped(call)

    def handle(self, call: Gather[Any]) -> str:
        """Return the name of the handle of a cell that the notebook does not wait for; empty for other calls."""
        return self._handles.get(call.port, "")

    def cell_of(self, port: int) -> int:
        """Return the number of the cell that made a call; 0 if that is unknown."""
        return self._cells.get(port, (0, 0.0))[0]

    def has_handle(self, port: int) -> bool:
        """Return whether a call is of a cell that the notebook does not wait for."""
        return port in self._handles

    def stop(self, calls: Iterable[Gather[Any]]) -> None:
        """Record that calls are being stopped."""
        for call in calls:
            self._stopping[call.port] = True

    def is_stopping(self, call: Gather[Any]) -> bool:
        """Return whether a stop has begun to end a call."""
        return call.port in self._stopping

    def leave(self, port: int, proc: str) -> None:
        """Record that a stop did not end a call in a process."""
        self._left.setdefault(port, set()).add(proc)

    def clean(self, port: int, proc: str) -> None:
        """Record that a stopped call cleans up in a process."""
        self._cleaning.setdefault(port, set()).add(proc)

    def is_cleaning(self, port: int, proc: str) -> bool:
        """Return whether a stop left a call in a process to clean up."""
        return proc in self._cleaning.get(port, ())

    def is_left(self, port: int, proc: str) -> bool:
        """Return whether a stop did not end a call in a process, so that the next one replaces the process."""
        return proc in self._left.get(port, ()) and split_proc(proc)[0] in meshes_of(self._node).own_procs

    def is_unended(self, port: int, proc: str) -> bool:
        """Return whether a stop did not end a call in a process, or left it to clean up."""
        return self.is_left(port, proc) or self.is_cleaning(port, proc)

    def has_left(self, each: EarlierCall) -> bool:
        """Return whether a stop did not end a call that others wait for."""
        return any(self.is_left(each.call.port, proc) for proc in each.procs)

    def left(self) -> list[Gather[Any]]:
        """Return the calls that a stop did not end."""
        gathers = [self._node.ports.gathers.get(port) for port in list(self._left)]
        return [each for each in gathers if is_gather(each) and each.waits_for()]

    def of_cell(self, calls: Iterable[Gather[Any]]) -> list[Gather[Any]]:
        """Return the calls that can be stopped."""
        return [call for call in calls if call.actor and not _is_special(call)]

    def unended(self) -> list[EarlierCall]:
        """Return the calls that ranks have not answered, oldest first."""
        gathers = [each for each in list(self._node.ports.gathers.values()) if is_gather(each)]
        unanswered = [EarlierCall(each, frozenset(peer.proc for peer in each.waits_for())) for each in gathers]
        return [each for each in unanswered if each.procs]


def _is_special(call: Gather[Any]) -> bool:
    # Ops on distributed tensors continue, so that all ranks have run the same ones.
    return call.method.startswith("__") or _is_unstopped(call)


def _is_unstopped(call: Gather[Any]) -> bool:
    cls = call.view._state.cls if call.view is not None else None
    return call.method in getattr(cls, "monarch_unstopped", ())
