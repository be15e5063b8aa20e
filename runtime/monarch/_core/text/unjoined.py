"""The sentence about ranks that wait in a collective for ranks that have finished."""

from __future__ import annotations

from collections.abc import Collection

from monarch._core.shapes.ranks import describe_ranks
from monarch._core.unjoined import CollectiveWait, UnjoinedRanks


def describe_unjoined(finding: UnjoinedRanks, count: int, where: str, what: str, ranks_of_call: Collection[int]) -> str:
    """Return the problem and what to do, without a full stop.

    Args:
        finding: the ranks.
        count: ranks of the mesh.
        where: what the absent ranks have finished, such as ``this cell``.
        what: what to do about the waiting code, such as ``stop the cell``.
        ranks_of_call: the ranks that run the waiting code.
    """
    waits, ranks = finding.waits, list(finding.ranks)
    has = "has" if len(ranks) == 1 else "have"
    absent = describe_ranks(list(finding.absent), count)
    has_not, them = ("has not", "that rank") if len(finding.absent) == 1 else ("have not", "those ranks")
    do = f"make the matching call on {them}" if waits.peers else "call it on all ranks of the group"
    return (
        f"{describe_ranks(ranks, count)} {has} waited {finding.seconds:.1f} s in {_operation(waits)} "
        f"that {absent} {has_not} joined: {_why(finding.absent, where, ranks_of_call)}; {what}, or {do}"
    )


def _why(absent: Collection[int], where: str, ranks_of_call: Collection[int]) -> str:
    """Return why ranks have not joined: they have finished the waiting code, or it does not run on them."""
    outside = [rank for rank in absent if rank not in ranks_of_call]
    if not outside:
        return f"{'it has' if len(absent) == 1 else 'they have'} finished {where}"
    if len(outside) == len(absent):
        return f"{where} does not run on {'it' if len(absent) == 1 else 'them'}"
    finished = [rank for rank in absent if rank in ranks_of_call]
    has = "has" if len(finished) == 1 else "have"
    return f"{describe_ranks(finished)} {has} finished {where}, which does not run on {describe_ranks(outside)}"


def _operation(waits: CollectiveWait) -> str:
    group = "the default group" if waits.is_default else f"the group of {describe_ranks(list(waits.members))}"
    name = f"{waits.operation}(), " if waits.operation else ""
    if not waits.number:
        return f"{waits.operation}()"
    kind = "a point-to-point operation" if waits.peers else "a collective"
    return f"{kind} ({name}#{waits.number} of {group})"
