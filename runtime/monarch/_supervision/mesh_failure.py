"""Failures as supervisors and hooks receive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._core.shapes.ranks import describe_ranks


class MeshFailure:
    """A failure in a mesh, as passed to ``supervise``, ``__supervise__`` and ``unhandled_fault_hook``.

    Attributes:
        mesh_name: name of the mesh.
        mesh: the mesh, if this process still has it.
        ranks: base ranks that failed.
        text: what happened, with the last lines of stderr or the traceback.
        reason: the same in one line: signal, exit code or exception, and the cell line.
        when: when this process learned of it, in seconds since the epoch.
        running: the calls that waited for these ranks, such as ``trainers.step()``.
        actors: names of the actor meshes that lost an actor with their process; empty if an actor failed by itself.
        port: number of the spawn whose constructors raised, by which a notebook finds its cell; 0 otherwise.
    """

    def __init__(
        self,
        mesh_name: str,
        mesh: Any,
        ranks: tuple[int, ...],
        text: str,
        reason: str = "",
        when: float = 0.0,
        running: Sequence[str] = (),
        port: int = 0,
        actors: Sequence[str] = (),
    ) -> None:
        self.mesh_name = mesh_name
        self.mesh = mesh
        self.ranks = ranks
        self.text = text
        self.reason: str = reason or text.partition("\n")[0]
        self.when = when
        self.running: tuple[str, ...] = tuple(running)
        self.port = port
        self.actors: tuple[str, ...] = tuple(actors)

    def report(self) -> str:
        """Return the failed ranks, the cause, and the running calls."""
        return report_of(self, self.mesh_name)

    def __str__(self) -> str:
        return f"MeshFailure(mesh_name={self.mesh_name!r}, crashed_ranks={list(self.ranks)}): {self.report()}"

    def __repr__(self) -> str:
        return f"<MeshFailure {self.mesh_name} {describe_ranks(self.ranks)}>"


def report_of(failure: MeshFailure, mesh: str) -> str:
    """Return the failed ranks of a failure, the cause, and the running calls.

    Args:
        failure: the failure.
        mesh: what the text calls the mesh.
    """
    head, newline, rest = f"{describe_ranks(failure.ranks)} of {mesh}: {failure.text}".partition("\n")
    doing = f", in {', '.join(failure.running)}" if failure.running else ""
    lost = f"; its actors: {', '.join(failure.actors)}" if failure.actors else ""
    return f"{head}{doing}{lost}{newline}{rest}"
