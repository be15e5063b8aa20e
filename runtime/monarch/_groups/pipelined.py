"""Calls sent before a failure was known get no process group until the failed call has ended everywhere.

Otherwise the failed rank would join, in its next call, the collective in which the others still wait in the failed
call, and all later calls would pair collectives of different calls and return wrong numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.asking import ask_proc
from monarch._node.services.registry import service
from monarch.exceptions import MonarchError

_EVERY = 0.02
"""Seconds between requests."""
_ANSWER = 10.0
"""Seconds for the caller to answer; after that the call goes on."""
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
def ended(uid: str, failed: Sequence[int], port: int) -> int | None:
    """Service of a caller: return whether a call may use groups after others have failed.

    Args:
        uid: of the process mesh.
        failed: ports of the failed calls on the asking rank.
        port: of the call.

    Returns:
        None if the call was sent before a failure was known and the failed call has not ended on all ranks. Otherwise
        the newest generation with freed ranks; 0 if there is none.
    """
    node = current_node()
    failures = node.part(Failures)
    for each in failed:
        if each in node.ports.sinks and port <= failures.heard.get(each, port):
            return None
    return failures.freed.get(uid, 0)


def await_end(caller: str, uid: str, failed: Sequence[int], port: int) -> int:
    """Wait until a call may use groups; in the thread of the call.

    Returns:
        The newest generation with freed ranks; 0 if there is none, or the caller is gone or does not answer.
    """
    while True:
        try:
            number = ask_proc(caller, ended, uid, list(failed), port).get(_ANSWER)
        except MonarchError:
            return 0
        if number is not None:
            return number
        time.sleep(_EVERY)
