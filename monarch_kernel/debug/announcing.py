"""Lines in the cells whose ranks stop at a breakpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from monarch._kernel_api import PAUSE, StoppedRank, describe_ranks, is_gather, open_node, split_proc, stops
from monarch_kernel.debug.grouped import grouped_lines
from monarch_kernel.debug.places import innermost
from monarch_kernel.output.streams import Streams

_GRACE = 0.2
"""Seconds for other ranks to come to the same breakpoint, so that they share a line."""


class Announcing:
    """Shows stops of ranks in the cells that wait for them, where no prompt does.

    Args:
        streams: returns the streams of the notebook.
        is_shown: tells whether a prompt shows a stop, or has shown it.
        ask: asks what to do, given the uid of a mesh, if a cell waits for its calls, or returns what to say instead; it
            must not wait.
    """

    def __init__(
        self, streams: Callable[[], Streams], is_shown: Callable[[StoppedRank], bool], ask: Callable[[str], str]
    ) -> None:
        self._streams = streams
        self._is_shown = is_shown
        self._ask = ask
        # Receiving thread only.
        self._new: list[StoppedRank] = []

    def attach(self) -> None:
        """Show the stops of this session."""
        stops().on_stop = self._stopped
        if self._paused not in stops().on_pause:
            stops().on_pause.append(self._paused)

    def _stopped(self, stopped: StoppedRank) -> None:
        if stopped.kind == "step":
            # The command for a step shows its end.
            return
        if not self._new:
            open_node().receive_loop.call_later(_GRACE, self._show)
        self._new.append(stopped)

    def _paused(self, proc: str) -> None:
        paused = stops().by_hand.get(proc)
        if paused is not None:
            self._stopped(paused)

    def _show(self) -> None:
        new, self._new = self._new, []
        streams = self._streams()
        by_uid: dict[str, list[StoppedRank]] = {}
        for each in new:
            if each in (stops().now.get(each.proc), stops().by_hand.get(each.proc)) and not self._is_shown(each):
                by_uid.setdefault(each.uid, []).append(each)
        for uid, group in by_uid.items():
            if all(each.kind == PAUSE for each in group):
                # The command or button for it tells where they are.
                self._ask(uid)
                continue
            port = max((_port_of(each.proc) for each in group), default=0)
            streams.tell(f"{describe_stops(group, stops().parked(uid))}\n", port)
            advice = self._ask(uid)
            if advice:
                streams.tell(f"{advice}\n", port)


def describe_stops(stopped: Iterable[StoppedRank], parked: Iterable[str]) -> str:
    """Return in lines where ranks have stopped, and who waits for them."""
    text = grouped_lines((each.rank, innermost(each.position)) for each in sorted(stopped, key=lambda each: each.rank))
    waiting = sorted(split_proc(proc)[1] for proc in parked)
    if waiting:
        text += f"\n{describe_ranks(waiting)}: paused meanwhile"
    return text


def _port_of(proc: str) -> int:
    """Return the port of the newest call that a rank has not answered; 0 without one."""
    gathers: dict[int, Any] = open_node().ports.gathers
    ports = [
        port
        for port, each in list(gathers.items())
        if is_gather(each) and each.actor and any(peer.proc == proc for peer in each.waits_for())
    ]
    return min(ports, default=0)
