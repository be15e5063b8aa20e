"""How far this rank is in the ops of each mesh. After a failure, ranks that are behind go on up to the op that failed.

The rank that failed has taken part in the collectives of all ops before. If others were cut in one of these, they would
have to run it again without the ranks that have completed it. So the connections are cut once all ranks are there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from monarch._core.roster import Procs
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import DispatchMode, group_of_name, group_of_object
from monarch._engine.rank.restoring import is_op
from monarch._groups.breaking import give_up, give_up_everywhere
from monarch._groups.rendezvous import is_dead, local_rendezvous
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch.exceptions import GroupError


class Progress:
    """Numbers of ops that this rank has run since all ranks have agreed, by mesh or slice, and where it must stop.

    Negative numbers are those of ops that waited then. So the same op has the same number on all ranks.
    """

    def __init__(self) -> None:
        self._counts: dict[Region, int] = {}
        """Written by the thread of the executor."""
        self._generation = 0
        """Of process groups, for which the numbers hold. Likewise."""
        self.halted = True
        """Whether this rank runs no ops. Likewise."""
        self._limits: tuple[tuple[int, Region, int, int], ...] = ()
        """Generation, mesh, number and rank of ops that have failed elsewhere. Written by the receiving thread."""
        self._there: tuple[int, frozenset[int]] = (0, frozenset())
        """Ranks that have stopped since an op has failed here, and the generation. Likewise."""

    def begin(self, generation: int, waiting: Counter[Region]) -> None:
        """Count from the ops on which all ranks have agreed."""
        self._counts = {region: -number for region, number in waiting.items()}
        self._generation = generation

    def count(self, region: Region) -> None:
        """Note that an op has run, or has failed."""
        self._counts[region] = self._counts.get(region, 0) + 1

    def number(self, region: Region) -> int:
        """Return the number of the op of a mesh that runs, or is next."""
        return self._counts.get(region, 0)

    def limit(self, generation: int, region: Region, number: int, rank: int) -> bool:
        """Stop before an op that has failed on a rank; return whether this rank is there already."""
        # First the limit: the thread that counts sees it before its next op.
        kept = (each for each in self._limits if each[0] >= generation)
        self._limits = (*kept, (generation, region, number, rank))
        return self._generation == generation and (self.halted or self._has_reached(region, number))

    def is_there(self) -> bool:
        """Return whether the next op has failed elsewhere, or comes after one that has."""
        return bool(self._limits) and any(
            generation == self._generation and self._has_reached(region, number)
            for generation, region, number, _ in self._limits
        )

    def is_over(self) -> bool:
        """Return whether this rank must not run its next op. It runs the one that failed, to tell if it does here."""
        return bool(self._limits) and any(
            generation == self._generation and self._has_reached(region, number + 1)
            for generation, region, number, _ in self._limits
        )

    def stopped(self) -> list[tuple[int, int]]:
        """Return the generation and the rank of each failure elsewhere."""
        return [(generation, rank) for generation, _, _, rank in self._limits if generation == self._generation]

    def note_there(self, generation: int, rank: int) -> frozenset[int]:
        """Note that a rank has stopped, and return all that have."""
        known = self._there[1] if self._there[0] == generation else frozenset[int]()
        self._there = generation, known | {rank}
        return self._there[1]

    def _has_reached(self, region: Region, number: int) -> bool:
        # A rank that is not of this mesh or slice does not know where it is.
        return region.position_of(current_node().rank) is None or self.number(region) >= number


progress = Progress()


def stop_all(generation: int, region: Region) -> None:
    """Stop all ranks at the running op of a mesh, which has failed here, and then break the process groups."""
    own = local_rendezvous()
    if own.world is None or own.broken or own.generation != generation:
        return
    procs, number = own.procs(), progress.number(region)
    others = _others(procs)
    for each in others:
        tell_proc(current_node(), procs.proc(each), stop_at, procs, generation, region, number, current_node().rank)
    if not others:
        give_up(procs, generation)


def tell_stopped() -> None:
    """Tell the ranks on which an op has failed that this one has stopped."""
    for generation, rank in progress.stopped():
        _tell(local_rendezvous().procs(), generation, rank)


def give_up_here(generation: int) -> None:
    """Break this rank's process groups, since all ranks have stopped, if the news of that are not here yet."""
    own = local_rendezvous()
    if own.world is not None and not own.broken:
        give_up(own.procs(), generation)


@service("progress.stop_at", "quick")
def stop_at(procs: Procs, generation: int, region: Region, number: int, rank: int) -> None:
    """Handle the news that an op has failed on another rank."""
    if progress.limit(generation, region, number, rank):
        _tell(procs, generation, rank)


@service("progress.is_there", "quick")
def is_there(procs: Procs, generation: int, rank: int) -> None:
    """Handle the news that a rank has stopped before or in the op that has failed here, or is in a later one."""
    if progress.note_there(generation, rank).issuperset(_others(procs)):
        # Those that wait in a collective of this op, or of a later one, wait for ranks that have stopped.
        give_up_everywhere(generation)


def _tell(procs: Procs, generation: int, rank: int) -> None:
    if not is_dead(procs.proc(rank)):
        tell_proc(current_node(), procs.proc(rank), is_there, procs, generation, current_node().rank)


def _others(procs: Procs) -> list[int]:
    return [each for each in range(procs.size) if each != current_node().rank and not is_dead(procs.proc(each))]


class BehindMode(DispatchMode):
    """A block that runs an op which some ranks have completed: a collective with one of these raises.

    Args:
        pending: ranks that have not completed the op.
    """

    def __init__(self, pending: frozenset[int]) -> None:
        DispatchMode.__init__(self)
        self._pending = pending

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if "c10d" in str(func) and any(rank not in self._pending for arg in args for rank in _ranks_of(arg)):
            raise GroupError(
                "another op failed while this one was exchanging data; some ranks have completed it, so that it cannot "
                "run again"
            )
        return func(*args, **(kwargs or {}))


def _ranks_of(arg: Any) -> list[int]:
    group = group_of_object(arg) or (group_of_name(arg) if isinstance(arg, str) else None)
    return dist.get_process_group_ranks(group) if group is not None else []


def ranks_behind(kept: list[tuple[Region, Any]], waiting: dict[Region, dict[int, int]]) -> dict[int, frozenset[int]]:
    """Return the ranks that have not completed an op, by id of its entry, for waiting ops that others have completed.

    Args:
        kept: the entries that wait on this rank.
        waiting: how many ops wait on each rank, by mesh or slice.
    """
    left = Counter(region for region, entry in kept if is_op(entry))
    found: dict[int, frozenset[int]] = {}
    for region, entry in kept:
        if is_op(entry):
            ranks = waiting.get(region, {})
            pending = frozenset(rank for rank, number in ranks.items() if number >= left[region])
            if len(pending) < len(ranks):
                found[id(entry)] = pending
            left[region] -= 1
    return found
