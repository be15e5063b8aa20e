"""Errors of meshes with dead ranks, in the words of the notebook."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from monarch._kernel_api import Dead, advice, current_node, describe, describe_all, describe_ranks, state_of
from monarch.exceptions import DeviceMeshError
from monarch_kernel.meshes.mesh import Mesh


@contextmanager
def naming_deaths(mesh: Mesh | None) -> Generator[None]:
    """Raise errors of calls to the mesh with the dead ranks and the magics that help, not with the failed call."""
    __tracebackhide__ = True
    try:
        yield
    except DeviceMeshError as error:
        raise (error if mesh is None else death_error(error, mesh)) from None


def death_error(error: DeviceMeshError, mesh: Mesh) -> DeviceMeshError:
    """Return the error about the dead ranks of a mesh; the error itself if none is dead."""
    dead = mesh.dead()
    if not dead:
        return error
    node, procs = current_node(), state_of(mesh.procs).procs
    deaths = {rank: node.peers.get(procs.proc(rank)).dead for rank in dead}
    alive = [rank for rank in range(len(mesh.procs)) if rank not in deaths]
    todo = advice().after_deaths(procs.uid, dead, alive)
    text = "\n".join([*_sentences(mesh.name, deaths), todo])
    made = type(error)(text, mesh=error.mesh, ranks=error.ranks, results=error.results, when=error.when)
    made.advice = todo
    return made


def _sentences(name: str, deaths: dict[int, Dead | None]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for rank, dead in deaths.items():
        if dead is not None:
            groups.setdefault(repr((dead.cause, dead.at)), []).append(rank)
    lines: list[str] = []
    for ranks in groups.values():
        dead = deaths[ranks[0]]
        assert dead is not None
        how = (describe_all if len(ranks) > 1 else describe)(dead.cause, dead.at)
        lines.append(f"{describe_ranks(ranks)} of mesh {name!r} {how}")
    return lines
