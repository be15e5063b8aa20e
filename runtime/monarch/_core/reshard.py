"""The copy plan of a reshard: who fetches what from whom, so that each process gets its parts of tensors.

Each byte goes to a host once, however many processes there need it: they split the fetch, and copy the rest from each
other. If several hosts need the same bytes, each fetches a share of them from the sources, and the rest from the other
hosts; so no source sends more than one copy of what all need, and every host forwards its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch._core.shapes.boxes import Box, cells_of, elements, grid, split
from monarch.exceptions import ShapeError

SOURCE, TARGET = 0, 1
FROM_SOURCES, BETWEEN_HOSTS, WITHIN_HOSTS = 0, 1, 2
"""The phases; each begins when the previous one has ended everywhere."""
_LEAST = 1 << 20
"""Bytes below which a piece is not split further."""


class BoxHolder(NamedTuple):
    """A process, and the box of each tensor that it has or needs."""

    host: str
    boxes: Mapping[str, Box]


class Fetch(NamedTuple):
    """A copy for a target to make."""

    name: str
    box: Box
    kind: int
    """From a source or from another target."""
    holder: int
    """Index of the source or target."""


@dataclass
class FetchPlan:
    """The fetches of each target in each phase."""

    phases: list[dict[int, list[Fetch]]] = field(default_factory=lambda: [{}, {}, {}])

    def add(self, phase: int, target: int, fetch: Fetch) -> None:
        """Add a fetch."""
        self.phases[phase].setdefault(target, []).append(fetch)


class _Balance:
    """Chooses the member with the least work so far."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}

    def choose(self, among: Sequence[int], size: int) -> int:
        best = min(among, key=lambda each: self._done.get(each, 0))
        self._done[best] = self._done.get(best, 0) + size
        return best


class Planner:
    """Plan one distribution.

    Args:
        sources: processes that hold tensors.
        targets: processes that need them.
        widths: bytes per element of each tensor.
    """

    def __init__(self, sources: Sequence[BoxHolder], targets: Sequence[BoxHolder], widths: Mapping[str, int]) -> None:
        self._sources = sources
        self._targets = targets
        self._widths = widths
        self._serving = _Balance()
        self._fetching = _Balance()
        self._plan = FetchPlan()

    def plan(self) -> FetchPlan:
        """Return the plan.

        Raises:
            ShapeError: no source has what a target needs; the text names it.
        """
        wanted: dict[str, list[int]] = {}
        for index, target in enumerate(self._targets):
            for name in target.boxes:
                wanted.setdefault(name, []).append(index)
        for name, targets in wanted.items():
            self._tensor(name, targets)
        return self._plan

    def _tensor(self, name: str, targets: list[int]) -> None:
        having = [index for index, source in enumerate(self._sources) if name in source.boxes]
        boxes = [self._sources[index].boxes[name] for index in having]
        wants = [self._targets[index].boxes[name] for index in targets]
        if len({len(box) for box in (*boxes, *wants)}) > 1:
            raise ShapeError(f"{name!r} has a different number of dims on different members; it cannot be copied")
        if not boxes:
            raise ShapeError(f"no source has tensor {name!r}; sources have {_some(self._sources)}")
        edges = grid([*boxes, *wants])
        holders: dict[Box, list[int]] = {}
        for index, box in zip(having, boxes, strict=True):
            for cell in cells_of(box, edges):
                holders.setdefault(cell, []).append(index)
        wanting: dict[Box, list[int]] = {}
        for index, box in zip(targets, wants, strict=True):
            for cell in cells_of(box, edges):
                wanting.setdefault(cell, []).append(index)
        for cell, who in wanting.items():
            if cell not in holders:
                at = ", ".join(f"{start}:{stop}" for start, stop in cell)
                raise ShapeError(f"no source has {name}[{at}], which target {who[0]} needs")
            self._cell(name, cell, holders[cell], who)

    def _cell(self, name: str, cell: Box, holders: list[int], targets: list[int]) -> None:
        size = elements(cell) * self._widths[name]
        by_host: dict[str, list[int]] = {}
        for index in targets:
            by_host.setdefault(self._targets[index].host, []).append(index)
        for host in list(by_host):
            near = [index for index in holders if self._sources[index].host == host]
            if near:
                # On the host already: each member copies it from there.
                for target in by_host.pop(host):
                    source = self._serving.choose(near, size)
                    self._plan.add(FROM_SOURCES, target, Fetch(name, cell, SOURCE, source))
        if by_host:
            self._far(name, cell, holders, by_host)

    def _far(self, name: str, cell: Box, holders: list[int], by_host: dict[str, list[int]]) -> None:
        size = elements(cell) * self._widths[name]
        everybody = sum(len(targets) for targets in by_host.values())
        units = split(cell, min(everybody, max(len(by_host) if size >= _LEAST else 1, size // _LEAST)))
        hosts = list(by_host)
        for number, unit in enumerate(units):
            part = size // len(units)
            first_host = hosts[number % len(hosts)]
            had: dict[str, int] = {}
            first = had[first_host] = self._fetching.choose(by_host[first_host], part)
            source = self._serving.choose(holders, part)
            self._plan.add(FROM_SOURCES, first, Fetch(name, unit, SOURCE, source))
            for host in hosts:
                if host != first_host:
                    fetcher = had[host] = self._fetching.choose(by_host[host], part)
                    self._plan.add(BETWEEN_HOSTS, fetcher, Fetch(name, unit, TARGET, first))
            for host, targets in by_host.items():
                for target in targets:
                    if target != had[host]:
                        self._plan.add(WITHIN_HOSTS, target, Fetch(name, unit, TARGET, had[host]))


def _some(holders: Sequence[BoxHolder]) -> str:
    names = sorted({name for holder in holders for name in holder.boxes})
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
