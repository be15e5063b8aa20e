"""The ranks that have stopped by themselves, as the program that controls them knows them.

While a rank is at a breakpoint, the other ranks of its mesh that run a call are paused too, so that none of them waits
in vain or runs ahead. They continue when the last one has left its breakpoint, in whatever way, its death included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from monarch._actors.pausing.tracing import BREAKPOINT, ERROR
from monarch._core.position import Packed, Position
from monarch._core.roster import split_proc
from monarch._debug.stepping import park_here, unpark_here
from monarch._debug.terminal import Terminal
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.replies.gather import is_gather
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch._wire.receiving.aside import tell
from monarch.config import BREAK_ALONE

PAUSE = "pause"
"""The kind of a rank that somebody has paused, beside those of ``Stop``."""
_GRACE = 0.15
"""Seconds in which other ranks may come to the same breakpoint by themselves."""


class StoppedRank(NamedTuple):
    """A rank that has stopped by itself."""

    proc: str
    kind: str
    """BREAKPOINT, STEP, ERROR or PAUSE."""
    position: Position

    @property
    def rank(self) -> int:
        """Its number in its mesh."""
        return split_proc(self.proc)[1]

    @property
    def uid(self) -> str:
        """Of its mesh."""
        return split_proc(self.proc)[0]


class Stops:
    """The stopped ranks of all meshes of a program. Receiving thread only, if nothing else is said."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Written by the receiving thread in single operations, read by any.
        self.now: dict[str, StoppedRank] = {}
        """By proc, the stopped ranks."""
        self.turns: dict[str, int] = {}
        """By proc, how often it has stopped or continued for good."""
        self._stepping: set[str] = set()
        """The ranks that are in a step."""
        self._holding: set[str] = set()
        """The ranks that keep others paused: at a breakpoint, or in a step from there."""
        self.paused: dict[str, tuple[Position, bool]] = {}
        """By proc, the ranks that are paused, but not by themselves, each with whether it waits for another one."""
        self.by_hand: dict[str, StoppedRank] = {}
        """By proc, those that somebody has paused."""
        self._parked: dict[str, set[str]] = {}
        """By uid of a mesh, the ranks that are paused because of those."""
        terminal = Terminal(self, tell)
        self.on_stop: Callable[[StoppedRank], object] = lambda stopped: terminal.show(
            stopped.proc, stopped.position, stopped.kind == BREAKPOINT
        )
        """Called for each stop. It must not wait. Set once."""
        self.on_pause: list[Callable[[str], object]] = []
        """Called with the proc when such a rank pauses or continues, as ``on_change``."""
        self.on_change: list[Callable[[], object]] = []
        """Called after each change, likewise. Any thread adds and removes, in single operations."""
        node.events.proc_died.subscribe(self._died)

    def stopped(self, stopped: StoppedRank) -> None:
        """Note that a rank has stopped."""
        self.now[stopped.proc] = stopped
        self._stepping.discard(stopped.proc)
        self.turns[stopped.proc] = self.turns.get(stopped.proc, 0) + 1
        if stopped.kind in (BREAKPOINT, ERROR):
            self._holding.add(stopped.proc)
            if not BREAK_ALONE():
                self._node.receive_loop.call_later(_GRACE, lambda: self._park(stopped.uid))
        self.on_stop(stopped)
        self._changed()

    def left(self, proc: str, step: bool) -> None:
        """Note that a rank continues, for a step or for good."""
        was = self.now.pop(proc, None)
        self._stepping.discard(proc)
        if step:
            self._stepping.add(proc)
            self.turns.setdefault(proc, 0)
        if not step and (was is not None or proc in self.turns):
            self.turns[proc] = self.turns.get(proc, 0) + 1
        if not step and proc in self._holding:
            self._holding.discard(proc)
            self._free(split_proc(proc)[0])
        if was is not None or not step:
            self._changed()

    def note_pause(self, proc: str, position: Position | None, parked: bool) -> None:
        """Note that a rank is paused, or continues from there."""
        self.by_hand.pop(proc, None)
        if position is not None:
            self.paused[proc] = position, parked
            if not parked:
                self.by_hand[proc] = StoppedRank(proc, PAUSE, position)
        elif self.paused.pop(proc, None) is None:
            return
        for each in list(self.on_pause):
            each(proc)
        self._changed()

    def _died(self, proc: str) -> None:
        self.note_pause(proc, None, False)
        self.left(proc, False)

    def _park(self, uid: str) -> None:
        if not any(split_proc(proc)[0] == uid for proc in self._holding):
            return
        running = {
            peer.proc
            for each in list(self._node.ports.gathers.values())
            if is_gather(each) and each.actor
            for peer in each.waits_for()
            if peer.dead is None and split_proc(peer.proc)[0] == uid
        }
        for proc in running - self.now.keys() - self._holding:
            self._parked.setdefault(uid, set()).add(proc)
            tell_proc(self._node, proc, park_here)

    def _free(self, uid: str) -> None:
        if any(split_proc(proc)[0] == uid for proc in self._holding):
            return
        for proc in self._parked.pop(uid, ()):
            if self._node.peers.get(proc).dead is None:
                tell_proc(self._node, proc, unpark_here)

    def positions(self) -> dict[str, Position]:
        """Return where the stopped ranks are; from any thread."""
        return {proc: each.position for proc, each in list(self.now.items())}

    def parked(self, uid: str) -> set[str]:
        """Return the ranks of a mesh that are paused because others are at a breakpoint; from any thread."""
        return set(self._parked.get(uid, ()))

    def stepping(self, uid: str) -> set[str]:
        """Return the ranks of a mesh that are in a step which has not ended; from any thread."""
        return {proc for proc in set(self._stepping) if split_proc(proc)[0] == uid}

    def held(self) -> set[str]:
        """Return the ranks that a prompt is for: the stopped ones, and those in a step that others are paused for; from
        any thread."""
        return {*self.now, *(proc for proc in set(self._stepping) if self._parked.get(split_proc(proc)[0]))}

    def _changed(self) -> None:
        for each in list(self.on_change):
            each()


def stops() -> Stops:
    """Return the stopped ranks of the meshes of this program."""
    return current_node().part(Stops)


@service("stops.stopped_there", "quick")
def stopped_there(proc: str, kind: str, packed: Packed) -> None:
    """Service: note that a rank has stopped by itself."""
    stopped = StoppedRank(proc, kind, Position.unpacked(packed))
    node = current_node()
    node.receive_loop.run_in_order(lambda: node.part(Stops).stopped(stopped))


@service("stops.left_there", "quick")
def left_there(proc: str, step: bool) -> None:
    """Service: note that a rank which had stopped continues, for a step or for good."""
    node = current_node()
    node.receive_loop.run_in_order(lambda: node.part(Stops).left(proc, step))


@service("stops.paused_there", "quick")
def paused_there(proc: str, packed: Packed, parked: bool) -> None:
    """Service: note that a rank is paused, but not by itself."""
    position, node = Position.unpacked(packed), current_node()
    node.receive_loop.run_in_order(lambda: node.part(Stops).note_pause(proc, position, parked))


@service("stops.resumed_there", "quick")
def resumed_there(proc: str) -> None:
    """Service: note that a rank continues from such a pause."""
    node = current_node()
    node.receive_loop.run_in_order(lambda: node.part(Stops).note_pause(proc, None, False))
