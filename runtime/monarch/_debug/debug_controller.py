"""``debug_controller()``: an actor of the program that tells which ranks are at a breakpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.roster import split_proc
from monarch._core.text.tables import text_table
from monarch._debug.stops import StoppedRank, stops
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node
from monarch._node.replies.gather import is_gather
from monarch._session.controllers import get_or_spawn_controller

_NAME = "debug_controller"
_COLUMNS = ("Actor Name", "Rank", "Coords", "Hostname", "Function", "Line No.")


class DebugSessionInfo(NamedTuple):
    """A rank that is at a breakpoint, or at the end of a step."""

    actor_name: str
    """The actor mesh whose endpoint it runs; that of processes if it is not known."""
    rank: int
    coords: dict[str, int]
    """Its place in the mesh of processes, by axes."""
    hostname: str
    function: str | None
    lineno: int | None


class DebugController(Actor):
    """The ranks of a program that wait at a breakpoint. See ``debug_controller``."""

    @endpoint
    async def wait_pending_session(self) -> None:
        """Wait until a rank is at a breakpoint."""
        loop, stopped = asyncio.get_running_loop(), stops()
        changed = asyncio.Event()

        def change() -> None:
            loop.call_soon_threadsafe(changed.set)

        stopped.on_change.append(change)
        try:
            while not stopped.now:
                await changed.wait()
                changed.clear()
        finally:
            stopped.on_change.remove(change)

    @endpoint
    async def list(self, print_output: bool = True) -> Sequence[DebugSessionInfo]:
        """Return the ranks that are at a breakpoint, by actor and rank.

        Args:
            print_output: whether to print them as a table too.
        """
        found = sorted(map(_info, list(stops().now.values())), key=lambda each: (each.actor_name, each.rank))
        if print_output:
            rows = [[str("" if value is None else value) for value in each] for each in found]
            print(text_table(_COLUMNS, rows) if rows else "no rank is at a breakpoint", flush=True)
        return found


def debug_controller() -> DebugController:
    """Return the actor that lists the ranks at a breakpoint, in any process of the session.

    ``list`` and ``wait_pending_session`` are its endpoints. Prompts for these ranks are in the terminal of the program
    and in ``python -m monarch debug``; ``mesh.evaluate()`` and ``mesh.resume()`` do the same in code.
    """
    return get_or_spawn_controller(_NAME, DebugController).get()


def _info(stopped: StoppedRank) -> DebugSessionInfo:
    frame = next(iter(stopped.position.frames), None)
    state = meshes_of(current_node()).own_procs.get(stopped.uid)
    procs = state.procs if state is not None else None
    coords = dict(procs.region().extent.point(stopped.rank)) if procs is not None else {}
    host = procs.host(stopped.rank) if procs is not None else ""
    return DebugSessionInfo(
        _actor_of(stopped), stopped.rank, coords, current_node().hosts.name_of(host or current_node().host),
        frame.function if frame is not None else None, frame.line if frame is not None else None,
    )  # fmt: skip


def _actor_of(stopped: StoppedRank) -> str:
    """Return the name of the actor mesh whose endpoint a rank runs, as far as this program waits for it."""
    node = current_node()
    for each in list(node.ports.gathers.values()):
        if is_gather(each) and each.actor and any(peer.proc == stopped.proc for peer in each.waits_for()):
            return each.mesh
    return node.names.get(split_proc(stopped.proc)[0], "")
