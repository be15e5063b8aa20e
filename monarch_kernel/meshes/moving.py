"""Ranks of notebook meshes that move off hosts: off those that are taken back, and off lost ones in a smaller mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch._kernel_api import (
    ActorMesh,
    BusyError,
    Drained,
    Future,
    check_sizes,
    describe_ranks,
    drain_hosts,
    give_copies,
    state_of,
    take_copies,
)
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.meshes.mesh import Mesh

_PATIENCE_S = 60.0
"""Seconds for the running calls, and for the variables."""


def move(
    mesh: Mesh, leaving: Sequence[str], free: Sequence[str], seconds: float, tell: Callable[[str], object]
) -> Drained:
    """Move the ranks of a mesh off hosts, with their variables; without enough other hosts, it shrinks.

    Ranks of lost hosts get the variables of those that leave for them.

    Args:
        mesh: the mesh.
        leaving: the hosts that its ranks leave, and that are given back.
        free: the hosts that they may move to.
        seconds: for the running calls, and for the variables.
        tell: called with lines about the ranks; not after a Stop, when the next cell prints them.

    Raises:
        BusyError: a cell still runs there; the mesh is as before.
    """
    cells = state_of(mesh.cells).key
    begun: list[tuple[Future[None], Drained]] = []

    def means(actors: ActorMesh) -> Any:
        return (give_copies, take_copies, ([],)) if state_of(actors).key == cells else None

    def define(ranks: list[int]) -> None:
        mesh.lack(ranks)
        mesh.define()

    def begin(future: Future[None], drained: Drained) -> None:
        begun.append((future, drained))
        mesh.moves.begin(future, lambda: _finish_move(mesh, drained, leaving))

    with mesh.changing():
        try:
            return drain_hosts(mesh.procs, leaving, free, seconds, means, define, succeed=True, begun=begin)
        except KeyboardInterrupt:
            # The next cell waits for it, and tells how it has ended.
            begun.clear()
            raise
        finally:
            for future, drained in begun:
                mesh.moves.ended(future)
                for line in _finish_move(mesh, drained, leaving):
                    tell(line)


def _finish_move(mesh: Mesh, drained: Drained, leaving: Sequence[str]) -> list[str]:
    """Give the hosts that were left back after a move; return the lines that tell of it."""
    if drained.moved or drained.gone:
        mesh.hosts.leave(leaving)
    return moved_lines(mesh, drained)


def leave_lost(mesh: Mesh, sizes: Mapping[str, int]) -> None:
    """Before a resize to fewer hosts, let its lost hosts leave; print lines about the ranks.

    Ranks at the end of the mesh hand their variables to those that the lost hosts had, on their own hosts.

    Raises:
        HeaderError: fewer hosts are left, or a cell still runs; the mesh is as before.
    """
    procs, lost = state_of(mesh.procs).procs, mesh.hosts.lost()
    axis = procs.labels[0] if procs.host_axes == 1 else ""
    if not lost or not axis or sizes.get(axis, len(procs.hosts) + 1) > len(procs.hosts):
        return
    check_sizes(mesh.procs, sizes)
    left, wanted = len({*procs.hosts}) - len(lost), sizes[axis]
    if wanted > left:
        raise HeaderError(
            f"mesh {mesh.name!r} has lost {len(lost)} of its {len(procs.hosts)} hosts and cannot resize to {wanted}; "
            f"{mesh.hosts.without_lost(mesh.name)}"
        )
    try:
        move(mesh, lost, (), _PATIENCE_S, print)
    except BusyError as error:
        are = "is" if len(error.busy) == 1 else "are"
        raise HeaderError(
            f"mesh {mesh.name!r} was not resized: {describe_ranks(error.busy)} {are} still running a cell after "
            f"{_PATIENCE_S:.0f} s; stop it or wait until it ends, then resize again"
        ) from None


def moved_lines(mesh: Mesh, drained: Drained) -> list[str]:
    """Describe what has moved, in lines."""
    lines: list[str] = []
    if drained.moved:
        lost = sorted(drained.lost)
        users = {state_of(each).name for each in mesh.users_actors()}
        procs = state_of(mesh.procs).procs
        where = ", ".join(dict.fromkeys(mesh.hosts.name(procs.host(rank)) for rank in drained.moved))
        what = f"; the variables of {describe_ranks(lost)} are lost" if lost else f" with {_whose(drained)}"
        lines.append(f"{describe_ranks(drained.moved)} of mesh {mesh.name!r} moved to {where}{what}")
        lines += [f"not moved: {name} ({why})" for name, why in _left_behind(drained).items()]
        names = [name for name in drained.recreated if name in users]
        if names:
            lines.append(
                f"actors {', '.join(names)}: recreated on {describe_ranks(drained.moved)}; their state is lost"
            )
    return lines


def _whose(drained: Drained) -> str:
    taken = [drained.successors[rank] for rank in drained.moved if rank in drained.successors]
    if taken:
        return f"the variables of {describe_ranks(taken)}"
    return f"{'its' if len(drained.moved) == 1 else 'their'} variables"


def _left_behind(drained: Drained) -> dict[str, str]:
    """Return the variables that did not move, with the reason."""
    left: dict[str, str] = {}
    for report in drained.reports.values():
        if report is not None:
            left.update(report[1])
    return left
