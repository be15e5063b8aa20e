"""The sentence about ranks that wait in a collective for ranks that have finished."""

from __future__ import annotations

from monarch._core.shapes.ranks import describe_ranks
from monarch._core.unjoined import Finding, Waits


def describe_unjoined(finding: Finding, count: int, where: str, what: str) -> str:
    """Return the problem and what to do, without a full stop.

    Args:
        finding: the ranks.
        count: ranks of the mesh.
        where: what the absent ranks have finished, such as ``this cell``.
        what: what to do about the waiting code, such as ``stop the cell``.
    """
    waits, ranks = finding.waits, list(finding.ranks)
    has = "has" if len(ranks) == 1 else "have"
    absent = describe_ranks(list(finding.absent), count)
    they, them = ("it has", "that rank") if len(finding.absent) == 1 else ("they have", "those ranks")
    do = f"call the other side of it on {them}" if waits.peers else "call it on all ranks of the group"
    return (
        f"{describe_ranks(ranks, count)} {has} waited {finding.seconds:.1f} s in {_operation(waits)} "
        f"that {absent} {they.split()[1]} not joined: {they} finished {where}; {what}, or {do}"
    )


def _operation(waits: Waits) -> str:
    group = "the default group" if waits.is_default else f"the group of {describe_ranks(list(waits.members))}"
    name = f"{waits.operation}(), " if waits.operation else ""
    if not waits.number:
        return f"{waits.operation}()"
    kind = "a point-to-point operation" if waits.peers else "a collective"
    return f"{kind} ({name}#{waits.number} of {group})"
