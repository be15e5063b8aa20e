"""Whether ranks are in step: each has begun as many collectives in each of its groups as the other members."""

from __future__ import annotations

from collections.abc import Mapping


def in_step(positions: Mapping[int, Mapping[str, int] | None]) -> bool:
    """Return whether all ranks that share a group have begun equally many collectives in it.

    Args:
        positions: for each rank, collectives begun by group name; None for a rank without groups.
    """
    begun: dict[str, int] = {}
    without = sum(1 for position in positions.values() if position is None)
    if without == len(positions):
        return True
    if without:
        return False
    return all(
        begun.setdefault(name, count) == count for each in positions.values() for name, count in (each or {}).items()
    )
