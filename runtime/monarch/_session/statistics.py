"""Counts of a process's pending work, for tests and for debugging of waits."""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch._actors.table import actors_of
from monarch._core.flow import FinishedStatistics, WindowStatistics
from monarch._meshes.verdicts import verdicts_of
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.registry import service


class Statistics(NamedTuple):
    """A snapshot of a process."""

    windows: dict[str, WindowStatistics]
    """The backlog of each living receiver, by proc id."""
    finished: dict[str, FinishedStatistics]
    """The finished cost for each sender, by proc id."""
    pending: dict[int, str]
    """The labels of pending calls, by port."""
    ports: dict[int, str]
    """The classes of all receivers of answers, by port."""
    verdicts: dict[str, list[str]]
    """The holders of open verdicts, by uid of the mesh."""
    mapped: int
    """Messages mapped here from other processes' shared memory."""
    waiting_for_memory: int
    """Threads waiting for room in shared memory."""
    mishaps: dict[str, int]
    """Messages that could not be handled, by kind."""


def statistics_of(node: Node) -> Statistics:
    """Return the counts of a process."""
    sinks = dict(node.ports.sinks)
    peers = list(node.peers.known.values())
    return Statistics(
        windows={peer.proc: peer.window.statistics() for peer in peers if peer.dead is None and peer.sent},
        finished={proc: finished.statistics() for proc, finished in list(node.replies.counts.items())},
        pending={
            port: gather.label for port, gather in list(node.ports.gathers.items()) if hasattr(gather, "waits_for")
        },
        ports={port: type(sink).__name__ for port, sink in sinks.items()},
        verdicts=verdicts_of(node).open_verdicts(),
        mapped=node.bulk.mapped,
        waiting_for_memory=len(node.bulk.spaces),
        mishaps=node.mishaps.statistics(),
    )


@service("statistics.account_of", "quick")
def account_of(proc: str) -> tuple[int, int] | None:
    """Service: return the costs of finished and of pending messages of another process.

    Their sum is the cost sent by that process; None if it changes too fast to count.
    """
    node = current_node()
    held: dict[int, int] = {}
    finished = node.replies.counts.get(proc)
    total = finished.statistics().total if finished is not None else 0
    try:
        for mailbox in list(actors_of(node).here.values()):
            _add(
                held,
                proc,
                [
                    *mailbox.queue,
                    *mailbox.turns.tasks.values(),
                    *(each for each, _ in mailbox.turns.waiting),
                    mailbox.running,
                ],
            )
        for waiting in list(actors_of(node).early.values()):
            _add(held, proc, [call for call, _ in waiting])
    except RuntimeError:
        # A queue changed meanwhile.
        return None
    if finished is not None and finished.statistics().total != total:
        return None
    return total, sum(held.values())


def _add(held: dict[int, int], proc: str, calls: list[Any]) -> None:
    held.update({id(call): call.cost for call in calls if call is not None and call.src == proc})
