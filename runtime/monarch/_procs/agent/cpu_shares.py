"""How ranks share the cores of a host. Pure."""

from __future__ import annotations

from itertools import pairwise


def affinity_plan(n: int, cores: list[int]) -> list[list[int]]:
    """Return the cores of each of ``n`` ranks.

    If there are enough cores, each rank gets a contiguous run, all cores are used, and sizes differ by at most one.
    Otherwise every rank gets all cores, and the scheduler shares them out.
    """
    if n > len(cores):
        return [list(cores) for _ in range(n)]
    bounds = [len(cores) * rank // n for rank in range(n + 1)] if n else [0]
    return [cores[start:end] for start, end in pairwise(bounds)]


def threads_plan(n: int, cores: list[int]) -> int:
    """Return how many compute threads each of ``n`` ranks should use: its share of the cores, and at least one."""
    return max(1, len(cores) // max(1, n))
