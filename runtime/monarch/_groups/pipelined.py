"""After a failed call, a rank gets no process group until older calls have ended: everywhere, for calls sent before the
failure was known; on the actors of the call itself, for later ones.

Otherwise the failed rank would join, in its next call, the collective in which the others still wait in the failed
call, and all later calls would pair collectives of different calls and return wrong numbers. The others may wait in
calls of their own: a loop over slices sends one call to each rank. A later call begins on each of its actors only when
older ones have ended there, so it waits no longer for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.asking import ask_proc
from monarch._node.services.registry import service
from monarch._wire.receiving.aside import tell
from monarch.config import FAILED_CALL_WAIT
from monarch.exceptions import CallTimeoutError, GroupError, MonarchError

_EVERY = 0.02
"""Seconds between requests."""
_ANSWER = 10.0
"""Seconds of waiting until a line reports it."""
_REMEMBERED = 10_000


class Failures:
    """The part of a caller with its failed calls. Leader only; others read single entries."""

    def __init__(self, _: Node) -> None:
        self.heard: dict[int, int] = {}
        """By the port of a call, the last port opened before its first failure was known."""
        self.freed: dict[str, int] = {}
        """By uid of the process mesh, the newest generation with ranks freed from a collective."""

    def hear(self, port: int, last: int) -> None:
        """Note that a call has failed somewhere."""
        if port:
            self.heard.setdefault(port, last)
        if len(self.heard) > _REMEMBERED:
            del self.heard[next(iter(self.heard))]

    def free(self, uid: str, number: int) -> None:
        """Note that ranks are freed from a collective of a generation."""
        self.freed[uid] = max(number, self.freed.get(uid, 0))


@service("pipelined.ended", "quick")
def ended(uid: str, failed: Sequence[int], port: int) -> int | str:
    """Service of a caller: return whether a call may use groups after others have failed.

    Args:
        uid: the uid of the process mesh.
        failed: ports of the failed calls on the asking rank.
        port: the port of the call.

    Returns:
        A description of an older call to the mesh that has not ended on all ranks; on its own actors, if it was sent
        after the failure was known. Otherwise the newest generation with freed ranks, or 0.
    """
    node = current_node()
    failures = node.part(Failures)
    this = node.ports.gathers.get(port)
    for each in failed:
        before = port <= failures.heard.get(each, port)
        if older := _older(node, uid, port, None if before else this):
            return older
        # One that is done has ended with a death, and ranks may still run it.
        if before and each in node.ports.sinks and not getattr(node.ports.sinks.get(each), "done", False):
            return "the call that failed"
    return failures.freed.get(uid, 0)


def _older(node: Node, uid: str, port: int, this: Any) -> str:
    """Return the oldest earlier call that ranks of a mesh have not answered, or an empty string.

    Args:
        node: the node of this process.
        uid: the uid of the process mesh.
        port: the port of the later call.
        this: the later call, whose actors matter; None for all.
    """
    own = {peer.proc for peer in this.targets} if this is not None else None
    for each, call in sorted(list(node.ports.gathers.items())):
        if this is not None and getattr(call, "actor", "") != this.actor:
            continue
        if each < port and (ranks := _owing(call, uid, own)):
            return f"{call.label} on {describe_ranks(ranks)}"
    return ""


def _owing(call: Any, uid: str, own: set[str] | None) -> list[int]:
    """Return the living ranks of a mesh that have not answered a call of actors."""
    if not getattr(call, "actor", "") or not call.watched or call.done:
        return []
    left = [peer.proc for peer in call.waits_for() if peer.dead is None and (own is None or peer.proc in own)]
    return [rank for mesh, rank in map(split_proc, left) if mesh == uid]


def await_end(caller: str, uid: str, failed: Sequence[int], port: int) -> int:
    """Wait until a call may use groups; in the thread of the call.

    Returns:
        The newest generation with freed ranks, or 0.

    Raises:
        GroupError: an older call has not ended in time, or the caller is gone or does not answer: a group used now
            might pair collectives of different calls.
    """
    wait = _Wait(caller)
    while True:
        answer = wait.answer(ask_proc(caller, ended, uid, list(failed), port))
        if isinstance(answer, int):
            return answer
        wait.pause(f"{answer} to end")
        time.sleep(_EVERY)


class _Wait:
    """One wait of a call, reported in a line after a while and ended by an error."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._begin = time.monotonic()
        self._bound = FAILED_CALL_WAIT()
        self._is_told = False

    def answer(self, future: Any) -> int | str:
        """Return the answer of the caller, which may be silent until the bound."""
        while True:
            # Outside of the handler, so that the error has no context that says less.
            with suppress(CallTimeoutError):
                return self._get(future)
            self.pause(f"{self._caller}, the process that sent it, to answer")

    def _get(self, future: Any) -> int | str:
        try:
            return future.get(min(_ANSWER, self._bound))
        except CallTimeoutError:
            raise
        except MonarchError as error:
            raise GroupError(f"{_SINCE}, and its caller cannot tell whether that call has ended: {error}") from error

    def pause(self, awaited: str) -> None:
        """Raise if the wait has lasted too long; report it once after a while."""
        seconds = time.monotonic() - self._begin
        if seconds >= self._bound:
            raise GroupError(
                f"cannot use the process group: {_SINCE}, and has waited {seconds:.1f} s for {awaited}; try again "
                f"after that, or raise {FAILED_CALL_WAIT.variable}"
            )
        if seconds >= _ANSWER and not self._is_told:
            self._is_told = True
            tell(f"monarch: {_SINCE}; it has waited {seconds:.1f} s for {awaited} before using a process group")


_SINCE = "this call was sent before the failure of another call was known"
