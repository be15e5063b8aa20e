"""Errors in a host agent's handlers: the caller is told; if nobody waits, the controller, in one line."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from monarch._core.causes import NotStarted
from monarch._core.text.seldom import Seldom
from monarch._procs.agent.children import Children
from monarch._wire import messages as m
from monarch.exceptions import ProtocolError, SupervisionError


class AgentMishaps:
    """Answers for messages that an agent could not handle. Used by the agent's one thread.

    Args:
        proc: proc id of the agent.
        children: its processes.
        tell: sends a message to a process.
        died: takes the death of a process of this host.
    """

    def __init__(
        self,
        proc: str,
        children: Children,
        tell: Callable[[str, m.AnyMessage], None],
        died: Callable[[m.Dead], None],
    ) -> None:
        self._proc = proc
        self._children = children
        self._tell = tell
        self._died = died
        self._seldom = Seldom()

    def failed(self, owner: str, frames: Sequence[Any], error: Exception) -> None:
        """Note frames that could not be handled; ``owner`` is the proc id of the controller, if known."""
        try:
            message = m.decode(frames[0])
        except ProtocolError:
            self._note(owner, "undecodable frame", error)
            return
        what = type(message).__name__
        try:
            if isinstance(message, m.Spawn):
                self._not_started(message, error)
            elif isinstance(message, (m.Cast, m.Route)) and frames[1:] and self._refused(message, frames[1], error):
                return
            self._note(owner, what, error)
        except Exception as again:
            self._note(owner, what, again)

    def _not_started(self, spawn: m.Spawn, error: Exception) -> None:
        """Report requested procs as failed; those already forked end."""
        cause = NotStarted(_text(error))
        for proc in spawn.procs:
            child = self._children.by_proc.get(proc)
            if child is not None and child.pid:
                child.kill(cause)
                continue
            dead = self._children.failed(proc, cause)
            if dead is not None:
                self._died(dead)
            else:
                self._tell(spawn.src, m.Dead(proc, cause, False, []))

    def _refused(self, carrier: m.Cast | m.Route, frame: Any, error: Exception) -> bool:
        """Answer the calls that a message carries; False if none of them waits for an answer."""
        carried = m.decode(frame)
        if not isinstance(carried, (m.Call, m.Create, m.Halt, m.Ask)) or not carried.port:
            return False
        procs = carrier.procs if isinstance(carrier, m.Cast) else [carrier.dst]
        for proc in procs:
            text = f"the host agent {self._proc} could not forward a message to {proc}: {_text(error)}"
            known = pickle.dumps(SupervisionError(text))
            failure = m.Failure("SupervisionError", text, "", f"SupervisionError: {text}", known, True)
            self._tell(carried.src, m.Reply(proc, carried.port, m.NOWHERE, m.ERROR, 0, m.encode(failure)))
        return True

    def _note(self, owner: str, what: str, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        count = self._seldom.count(f"{what} {type(error).__name__} {where}")
        if not count:
            return
        text = f"{what} was dropped: {_text(error)}" + (f"; {count:,} of this kind so far" if count > 1 else "")
        print(f"{self._proc}: {text} ({where})", file=sys.stderr, flush=True)
        if owner:
            failure = m.Failure(f"{what} was dropped", text, where, traceback.format_exc()[-10_000:], None, False)
            # The controller may be out of reach; that must not end everyone's ranks.
            with suppress(Exception):
                self._tell(owner, m.Fault(self._proc, m.INTERNAL, 0, m.encode(failure)))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]
