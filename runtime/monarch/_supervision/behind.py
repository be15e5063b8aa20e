"""Reports to waiting callers which call of the same actor theirs is queued behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.inside import state_of
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node
from monarch._node.future import is_awaited
from monarch._node.replies.gather import Gather, is_gather
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import request, service
from monarch._supervision.freeing import waiting
from monarch._wire.receiving.aside import tell

if TYPE_CHECKING:
    from monarch._node.node import Node

SOON = 3.0
"""Seconds of waiting for a call after which the ranks are asked what runs in front of it."""
_MOST = 8
"""Calls examined at a time."""
_HEARING = 0.3
"""Seconds for ranks to report what they run when a wait times out."""


@service("behind.ahead", "quick")
def ahead(key: str, src: str, port: int) -> tuple[str, float] | None:
    """Return what an actor of this process runs while a call is queued, and for how many seconds it has run.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller waits.

    Returns:
        None if the call is not queued.
    """
    mailbox = waiting(key, src, port)
    front = (mailbox.turns.call or mailbox.running) if mailbox is not None else None
    if mailbox is None or front is None or mailbox.spec is None:
        return None
    titles: dict[str, str] = getattr(mailbox.instance, "monarch_titles", {})
    title = titles.get(front.method, f"{mailbox.spec.name}.{front.method}()")
    return title, time.monotonic() - mailbox.since


class Behind:
    """Reports what runs in front of awaited calls. Leader only."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._first: dict[int, float] = {}
        """By port, when a wait for a call was first seen."""
        self._looks: dict[int, _Look] = {}
        """The answers of ranks, by port."""

    def tick(self, now: float) -> None:
        """Examine the awaited calls; about every second."""
        waited = {each.port: each for each in _waited(self._node)}
        self._first = {port: self._first.get(port, now) for port in waited}
        for port in [port for port in self._looks if port not in waited]:
            self._looks.pop(port).close()
        for port, gather in waited.items():
            look = self._looks.get(port)
            if look is not None:
                look.say()
                if look.is_early:
                    # The calls in front have only just begun; ask again later.
                    self._looks.pop(port).close()
                    self._first[port] = now
            elif now - self._first[port] >= SOON and len(self._looks) < _MOST:
                self._looks[port] = _Look(self._node, gather, True)


class _Look:
    """Asks the ranks that owe an answer what they run instead."""

    def __init__(self, node: Node, gather: Gather[Any], tells: bool = False) -> None:
        self._tells = tells
        self._label = gather.label
        self._count = len(gather.targets)
        self._ranks = {peer.proc: gather.base_rank(rank) for rank, peer in enumerate(gather.targets)}
        # Leader only; the waiting thread reads whether it is empty.
        self._pending = {peer.proc for peer in gather.waits_for() if peer.dead is None}
        self._node = node
        self._said = False
        """Whether the line was printed. Leader only."""
        self.running: dict[int, tuple[str, float]] = {}
        """By rank, the running call and its seconds. Leader only, except at a timeout."""
        self.thread: Any = None
        asked = request(ahead, gather.actor, node.proc, gather.port)
        self._answers = ServiceAnswers(node, sorted(self._pending), asked, self._heard)

    @property
    def done(self) -> bool:
        """Whether all have answered; for Waiter."""
        return not self._pending

    def _heard(self, proc: str, answer: Any) -> None:
        if isinstance(answer, (tuple, list)):
            self.running[self._ranks[proc]] = (answer[0], answer[1])
        self._pending.discard(proc)
        if self.done:
            self._node.receive_loop.notify(self)
            if self._tells:
                self.say()

    @property
    def is_early(self) -> bool:
        """Whether nothing that has run for long is in front of the call."""
        return self.done and not self._said and bool(self.running)

    def say(self) -> None:
        """Print on stderr, once, what has run for long."""
        running = {rank: each for rank, each in self.running.items() if each[1] >= SOON}
        if running and not self._said:
            self._said = True
            tell(f"monarch: {self._label} is waiting: {describe_ahead(running, self._count)}")

    def close(self) -> None:
        """Take no more answers."""
        self._answers.close()


def _waited(node: Node) -> Iterator[Gather[Any]]:
    """Return actor calls that a thread or event loop waits for; cells report their own waits."""
    for each in list(node.ports.gathers.values()):
        waited = is_gather(each) and not each.done and is_awaited(each)
        if waited and each.actor and each.method != "__init__" and not _is_notebook(node, each.actor):
            yield each


def _is_notebook(node: Node, key: str) -> bool:
    mesh = meshes_of(node).actor_meshes.get(key)
    return mesh is not None and state_of(mesh).cls.__module__.startswith("monarch._notebook.")


def ahead_now(gather: Gather[Any]) -> str:
    """Describe what runs in front of a call; empty if nothing is known. May take a moment."""
    node = current_node()
    if node.closed or not gather.actor or node.receive_loop.receives_here():
        return ""
    look = _Look(node, gather)
    try:
        node.receive_loop.wait(look, _HEARING)
        running = dict(look.running)
    finally:
        look.close()
    return describe_ahead(running, len(gather.targets)) if running else ""


def describe_ahead(running: Mapping[int, tuple[str, float]], count: int) -> str:
    """Return text such as ``rank 0 still runs c.loop(), begun 12 s ago``."""
    groups: dict[str, list[int]] = {}
    for rank, (what, _) in sorted(running.items()):
        groups.setdefault(what, []).append(rank)
    return "; ".join(
        f"{describe_ranks(ranks, count)} still run{'s' if len(ranks) == 1 else ''} {what}, "
        f"started {max(running[rank][1] for rank in ranks):.0f} s ago"
        for what, ranks in groups.items()
    )
