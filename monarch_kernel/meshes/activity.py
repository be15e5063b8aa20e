"""The work of the ranks of a mesh: the cell or call, its line, and for how long."""

from __future__ import annotations

from typing import NamedTuple

from monarch._kernel_api import (
    Vitals,
    current_node,
    describe,
    is_gather,
    split_proc,
    state_of,
)
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.rank_vitals import ask_vitals


class Busy(NamedTuple):
    """The oldest unanswered call of a rank."""

    title: str
    seconds: float
    stopped: bool
    """Whether a Stop did not end it."""

    def text(self, place: str = "", is_paused: bool = False) -> str:
        """Describe it.

        Args:
            place: where the rank is, as in ``cell [3] line 5``; empty if unknown.
            is_paused: whether a debugger has paused it.
        """
        where = place if place.startswith(f"{self.title} ") else ", ".join(filter(None, [self.title, place]))
        if is_paused:
            return f"paused: {where}; %mesh resume lets it continue"
        return f"{'stopped, but still in' if self.stopped else 'busy:'} {where}, {self.seconds:.0f} s"


def busy_ranks(mesh: Mesh, calls: CallRecord) -> dict[int, Busy]:
    """Return the ranks that owe an answer to the notebook."""
    node, uid = current_node(), state_of(mesh.procs).procs.uid
    by_rank: dict[int, Busy] = {}
    for port, each in sorted(node.ports.gathers.items()):
        if not is_gather(each) or not each.actor:
            continue
        for proc in [peer.proc for peer in each.waits_for()]:
            if split_proc(proc)[0] == uid:
                busy = Busy(calls.short_title(each), calls.seconds(each), calls.is_left(port, proc))
                by_rank.setdefault(split_proc(proc)[1], busy)
    return by_rank


def vitals_of(mesh: Mesh) -> dict[int, Vitals]:
    """Return the vitals of the ranks that answer soon."""
    node, procs = current_node(), state_of(mesh.procs).procs
    names = [procs.proc(rank) for rank in range(len(mesh.procs))]
    living = [proc for proc in names if node.peers.get(proc).dead is None]
    return {split_proc(proc)[1]: each for proc, each in ask_vitals(living).items()}


def dead_text(mesh: Mesh, rank: int) -> str:
    """Describe the death of a rank; empty for one that lives."""
    dead = current_node().peers.get(state_of(mesh.procs).procs.proc(rank)).dead
    if dead is None:
        return ""
    return "stopped" if dead.expected else f"dead: {describe(dead.cause, dead.at)}"
