"""The graph and the cost of a recorded step, for the person."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch._engine.issuing.lines import lines
from monarch._engine.rank.programs.accounts import OpRow
from monarch._engine.rank.programs.replaying import describe
from monarch._meshes.inside import view_at
from monarch.exceptions import ArgumentError


@dataclass(frozen=True)
class Graph:
    """The graph of a recorded step on one rank.

    Attributes:
        name: the name of the function.
        code: a line of Python for each op on the shards of the rank.
        ops: how many there are.
        collectives: how many of them are collectives.
    """

    name: str
    code: str
    ops: int
    collectives: int

    def __repr__(self) -> str:
        return self.code


@dataclass(frozen=True)
class CostRow:
    """Ops of one kind from one line.

    Attributes:
        op: the name of the op.
        line: the line of the program.
        count: how many.
        flops: floating point operations of all of them.
        bytes: read and written; for a collective, taken in.
        axis: the axis of the mesh, for a collective.
    """

    op: str
    line: str
    count: int
    flops: int
    bytes: int
    axis: str | None


@dataclass(frozen=True)
class Cost:
    """The cost of one call of a recorded step on one rank.

    Attributes:
        name: the name of the function.
        rows: by op and line, those with most bytes first.
        flops: the flops of all ops.
        bytes: that ops read and write.
        collectives: bytes that collectives take in, by axis.
    """

    name: str
    rows: tuple[CostRow, ...]
    flops: int
    bytes: int
    collectives: dict[str, int] = field(default_factory=dict[str, int])

    def __repr__(self) -> str:
        text = [f"{self.name}, on one rank: {self.flops:,} FLOPs, {self.bytes:,} bytes read and written"]
        text += [f"collectives along {axis}: {size:,} bytes" for axis, size in self.collectives.items()]
        text.append(f"{'op':40} {'calls':>6} {'FLOPs':>15} {'bytes':>15}  line")
        for row in self.rows:
            name = row.op + (f" ({row.axis})" if row.axis else "")
            text.append(f"{name:40} {row.count:6} {row.flops:15,} {row.bytes:15,}  {row.line}")
        return "\n".join(text)


def _described(name: str, mesh: Any, uid: int) -> tuple[str, list[OpRow]]:
    view = view_at(mesh.actors, mesh.region.slice(**dict.fromkeys(mesh.region.extent.labels, 0)))
    found = next(iter(mesh.recovery.ask(lambda: view.execute.call(describe, (uid,), {}).get()).values())).value
    if isinstance(found, str):
        raise ArgumentError(f"{name} has no graph: {found}")
    return found


def graph_of(name: str, mesh: Any, uid: int) -> Graph:
    """Return the graph that the first rank has."""
    code, rows = _described(name, mesh, uid)
    return Graph(name, code, len(rows), sum(row.axis is not None for row in rows))


def cost_of(name: str, mesh: Any, uid: int) -> Cost:
    """Return the cost on the first rank."""
    _, rows = _described(name, mesh, uid)
    groups: dict[tuple[str, int, str | None], list[OpRow]] = {}
    collectives: dict[str, int] = {}
    for row in rows:
        groups.setdefault((row.op, row.line, row.axis), []).append(row)
        if row.axis is not None:
            collectives[row.axis] = collectives.get(row.axis, 0) + row.sent
    found = [
        CostRow(op, _short(line), len(each), sum(r.flops for r in each), sum(r.size for r in each), axis)
        for (op, line, axis), each in groups.items()
    ]
    found.sort(key=lambda row: row.bytes, reverse=True)
    local = sum(row.size for row in rows if row.axis is None)
    return Cost(name, tuple(found), sum(row.flops for row in rows), local, collectives)


def _short(number: int) -> str:
    line = lines[number]
    return f"{line.file.rsplit('/', 1)[-1]}:{line.number}" if number else ""
