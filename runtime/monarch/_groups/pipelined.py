"""Calls that were sent before a failure was known take no process group until the failed call has ended everywhere.

Otherwise the rank that has failed would join, in the next call, the collective that the others still wait in for the
failed one, and all later calls would pair collectives of different calls and answer with wrong numbers.
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
"""Seconds between two questions."""
_ANSWER = 10.0
"""Seconds for the caller to answer one; after that the call goes on."""
_REMEMBERED = 10_000


class Failures:
    """The part of a caller that knows which of its calls have failed. Leader only; others read single entries."""

    def __init__(self, _: Node) -> None:
        self.heard: dict[int, int] = {}
        """By the port of a call, the last port that was opened before its first failure was heard."""
        self.freed: dict[str, int] = {}
        """By uid of the mesh of processes, the newest round in which ranks were freed from a collective."""

    def hear(self, port: int, last: int) -> None:
        """Note that a call has failed somewhere."""
        if port:
            self.heard.setdefault(port, last)
        if len(self.heard) > _REMEMBERED:
            del self.heard[next(iter(self.heard))]

    def free(self, uid: str, number: int) -> None:
        """Note that ranks are freed from a collective of a round."""
        self.freed[uid] = max(number, self.freed.get(uid, 0))


@service("pipelined.ended", "quick")
def ended(uid: str, failed: Sequence[int], port: int) -> int | None:
    """Service of a caller: whether a call may use groups after others have failed.

    Args:
        uid: of the mesh of processes.
        failed: ports of the calls that have failed on the rank that asks.
        port: of the call.

    Returns:
        None if it was sent before a failure was heard of, and that call has not ended on all ranks. Otherwise the
        newest round in which ranks were freed, 0 if none was.
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
        The newest round in which ranks were freed; 0 if none was, or the caller is gone or does not answer.
    """
    while True:
        try:
            number = ask_proc(caller, ended, uid, list(failed), port).get(_ANSWER)
        except MonarchError:
            return 0
        if number is not None:
            return number
        time.sleep(_EVERY)
