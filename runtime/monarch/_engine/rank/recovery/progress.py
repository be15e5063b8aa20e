"""How far this rank is in the ops of each mesh. After a failure, ranks that are behind run up to the op that failed.

The rank that failed has taken part in the collectives of all ops before. If others were cut in one of these, they would
have to run it again without the ranks that have completed it. So the connections are cut once all ranks are there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from monarch._core.roster import Procs
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import DispatchMode, group_of_name, group_of_object
from monarch._engine.rank.recovery.restoring import is_op
from monarch._groups.breaking import give_up, give_up_everywhere
from monarch._groups.rendezvous import is_dead, local_rendezvous
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch.exceptions import GroupError


class Limit(NamedTuple):
    """An op that has failed on another rank.

    Attributes:
        epoch: since ranks have agreed last; they count ops from there.
        rank: on which it has failed.
        region: the mesh or slice of the op.
        counts: ops that the rank has completed, by mesh or slice.
    """

    epoch: int
    rank: int
    region: Region
    counts: dict[Region, int]


class OpProgress:
    """Ops that this rank has completed since all ranks have agreed, by mesh or slice, and where it must stop.

    Numbers are negative for ops that waited then. So the same op has the same number on all ranks.
    """

    def __init__(self) -> None:
        self._counts: dict[Region, int] = {}
        """Written by the thread of the executor."""
        self._epoch = -1
        """Number of the attempt by which ranks have agreed last. Likewise."""
        self._abandoned = -1
        """Newest attempt that this rank has not completed, as its groups broke. Likewise."""
        self.failed_in = -1, 0
        """Epoch and generation of process groups in which an op has failed here. Likewise."""
        self.halted = True
        """Whether this rank runs no ops. Likewise."""
        self._limits: tuple[Limit, ...] = ()
        """Written by the receiving thread."""
        self._there: tuple[int, frozenset[int]] = (-1, frozenset())
        """Ranks that have stopped since an op has failed here, and the epoch. Likewise."""

    def begin(self, epoch: int, waiting: Counter[Region]) -> None:
        """Count from the ops on which all ranks have agreed."""
        self._counts = {region: -number for region, number in waiting.items()}
        self._epoch = epoch

    def abandon(self, epoch: int) -> None:
        """Note that this rank does not run ops in an epoch, in which others may."""
        self._abandoned = epoch

    def count(self, region: Region) -> None:
        """Note that an op has run, or has failed."""
        self._counts[region] = self._counts.get(region, 0) + 1

    def fail(self, region: Region, generation: int) -> Limit:
        """Note that the running op of a mesh has failed here, and return where the other ranks stop."""
        self.failed_in = self._epoch, generation
        return Limit(self._epoch, current_node().rank, region, {region: 0, **self._counts})

    def limit(self, limit: Limit) -> bool:
        """Stop at an op that has failed on a rank; return whether this rank is there already."""
        # First the limit: the thread that counts sees it before its next op.
        self._limits = (*(each for each in self._limits if each.epoch >= limit.epoch), limit)
        return self._is_there(limit)

    def there(self) -> list[Limit]:
        """Return the limits before which this rank has no op that the others have completed."""
        return [limit for limit in self._limits if self._is_there(limit)]

    def is_over(self) -> bool:
        """Return whether this rank must not run its next op. It runs the one that failed, to tell if it does here."""
        return any(
            limit.epoch == self._epoch
            and limit.region.position_of(current_node().rank) is not None
            and self._count(limit.region) > limit.counts[limit.region]
            for limit in self._limits
        )

    def note_there(self, epoch: int, rank: int) -> frozenset[int]:
        """Note that a rank has stopped, and return all that have."""
        known = self._there[1] if self._there[0] == epoch else frozenset[int]()
        self._there = epoch, known | {rank}
        return self._there[1]

    def _count(self, region: Region) -> int:
        return self._counts.get(region, 0)

    def _is_there(self, limit: Limit) -> bool:
        if limit.epoch != self._epoch:
            return limit.epoch == self._abandoned
        if self.halted:
            return True
        rank = current_node().rank
        return all(
            self._count(region) >= number
            for region, number in limit.counts.items()
            if region.position_of(rank) is not None
        )


progress = OpProgress()


def stop_all(generation: int, region: Region) -> None:
    """Stop all ranks at the running op of a mesh, which has failed here, and then break the process groups."""
    own = local_rendezvous()
    if own.world is None or own.broken or own.generation != generation:
        return
    procs, limit = own.procs(), progress.fail(region, generation)
    others = _others(procs)
    for each in others:
        tell_proc(current_node(), procs.proc(each), stop_at, procs, limit)
    if not others:
        give_up(procs, generation)


def tell_there() -> None:
    """Tell the ranks on which an op has failed that this one has stopped, or is in their op or a later one."""
    for limit in progress.there():
        _tell(local_rendezvous().procs(), limit)


def give_up_here(generation: int) -> None:
    """Break this rank's process groups, since all ranks have stopped, if the news of that are not here yet."""
    own = local_rendezvous()
    if own.world is not None and not own.broken:
        give_up(own.procs(), generation)


@service("progress.stop_at", "quick")
def stop_at(procs: Procs, limit: Limit) -> None:
    """Handle the news that an op has failed on another rank."""
    if progress.limit(limit):
        _tell(procs, limit)


@service("progress.is_there", "quick")
def is_there(procs: Procs, epoch: int, rank: int) -> None:
    """Handle the news that a rank has stopped before or in the op that has failed here, or is in a later one."""
    failed_in, generation = progress.failed_in
    if failed_in == epoch and progress.note_there(epoch, rank).issuperset(_others(procs)):
        # Those that wait in a collective of this op, or of a later one, wait for ranks that have stopped.
        give_up_everywhere(generation)


def _tell(procs: Procs, limit: Limit) -> None:
    if not is_dead(procs.proc(limit.rank)):
        tell_proc(current_node(), procs.proc(limit.rank), is_there, procs, limit.epoch, current_node().rank)


def _others(procs: Procs) -> list[int]:
    return [each for each in range(procs.size) if each != current_node().rank and not is_dead(procs.proc(each))]


class CompletedElsewhereError(GroupError):
    """A collective cannot run again, since other ranks have completed it."""


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
            raise CompletedElsewhereError(
                "another op failed while this one was exchanging data; some ranks have completed it, so it cannot run "
                "again"
            )
        return func(*args, **(kwargs or {}))


def _ranks_of(arg: Any) -> list[int]:
    group = group_of_object(arg) or (group_of_name(arg) if isinstance(arg, str) else None)
    return dist.get_process_group_ranks(group) if group is not None else []


def places(kept: list[tuple[Region, Any]]) -> dict[int, int]:
    """Return how many ops of its mesh or slice wait from each op on, by id of its entry."""
    left = Counter(region for region, entry in kept if is_op(entry))
    found: dict[int, int] = {}
    for region, entry in kept:
        if is_op(entry):
            found[id(entry)] = left[region]
            left[region] -= 1
    return found


def ranks_behind(
    kept: list[tuple[Region, Any]], places: dict[int, int], waiting: dict[Region, dict[int, int]]
) -> dict[int, frozenset[int]]:
    """Return the ranks that have not completed an op, by id of its entry, for waiting ops that others have completed.

    Args:
        kept: the entries that wait on this rank.
        places: how many ops waited from each one on when the ranks halted.
        waiting: how many ops waited on each rank then, by mesh or slice.
    """
    found: dict[int, frozenset[int]] = {}
    for region, entry in kept:
        place = places.get(id(entry))
        if place is not None:
            ranks = waiting.get(region, {})
            pending = frozenset(rank for rank, number in ranks.items() if number >= place)
            if len(pending) < len(ranks):
                found[id(entry)] = pending
    return found
