"""Errors in handling messages: reported to the waiting sender, else to the program in one line."""

from __future__ import annotations

import os
import traceback

from monarch._core.roster import split_proc
from monarch._core.text.seldom import Seldom
from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import pack_failure, unpack_failure
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell
from monarch.exceptions import MonarchError


class Mishaps:
    """Errors of this process's handlers, and undecodable messages. Any thread may use it."""

    def __init__(self, node: NodeLike) -> None:
        self._node = node
        self._seldom = Seldom()

    def undecodable(self, error: Exception) -> None:
        """Report an undecodable frame."""
        self._note("undecodable frame", error)

    def failed(self, message: m.AnyMessage, error: Exception) -> None:
        """Answer a message whose handler raised; if nobody waits, tell the program."""
        node = self._node
        match message:
            case m.Call():
                _refuse(node, message, error)
            case m.Create() | m.Halt() | m.Ask() if message.port:
                node.replies.answer(message.src, message.port, message.view, m.ERROR, _packed(error))
            case m.Ask():
                self._note(f"request for the service {message.service!r}", error)
            case _:
                self._note(type(message).__name__, error)

    def show(self, fault: m.Fault) -> None:
        """Show the mishap of another process in the program; equal ones of many processes once."""
        failure = unpack_failure(fault.body)
        count = self._seldom.count(f"{failure.kind} {failure.where}")
        if count:
            self._say(fault.src, f"{failure.text} ({failure.where})" if failure.where else failure.text, count)

    def forget(self) -> None:
        """Reset the counts."""
        self._seldom = Seldom()

    def statistics(self) -> dict[str, int]:
        """Return the counts by kind."""
        return self._seldom.statistics()

    def _note(self, what: str, error: Exception) -> None:
        """Tell the program, rarely if it repeats."""
        node, where = self._node, _place(error)
        count = self._seldom.count(f"{what} {type(error).__name__} {where}")
        if not count:
            return
        text = f"{what} was dropped: {type(error).__name__}: {error}".splitlines()[0][:500]
        if node.proc == node.root:
            self._say(node.proc, f"{text} ({where})", count)
            return
        failure = m.Failure(
            f"{what} was dropped", text + _times(count), where, traceback.format_exc()[-10_000:], None, False
        )
        node.peers.get(node.root).send(m.encode(m.Fault(node.proc, m.INTERNAL, node.rank, m.encode(failure))))

    def _say(self, proc: str, text: str, count: int) -> None:
        uid, rank = split_proc(proc)
        mesh = self._node.names.get(uid, uid)
        who = f"rank {rank} of {mesh}" if uid else "this program" if proc == self._node.proc else proc
        tell(f"monarch: internal error in {who}: {text}{_times(count)}")


def _refuse(node: NodeLike, call: m.Call, error: Exception) -> None:
    """Answer a call that could not be delivered, and give its cost back."""
    node.replies.finished(call.src, call.cost, bool(call.port))
    if call.port:
        node.replies.answer(call.src, call.port, call.view, m.ERROR, _packed(error))
    else:
        node.peers.get(call.src).send(m.encode(m.Fault(node.proc, call.actor, node.rank, _packed(error))))


def _packed(error: Exception) -> bytes:
    return pack_failure(error, isinstance(error, MonarchError))


def _place(error: BaseException) -> str:
    """Return the innermost line of the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _times(count: int) -> str:
    return f"; {count:,} of this kind so far" if count > 1 else ""
