"""``%mesh next``, ``step``, ``until``, ``finish`` and ``continue``: paused ranks continue, a little or for good."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from monarch._kernel_api import describe_ranks
from monarch.exceptions import ArgumentError
from monarch_kernel.debug.answering import MeshAnswering
from monarch_kernel.debug.pausing import Pausing, positions, resumed
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh

STEPS = ("next", "step", "until", "finish")


class Stepping:
    """The commands that let paused ranks continue for a step.

    Args:
        pausing: the commands beside them, which find the ranks that are meant.
    """

    def __init__(self, pausing: Pausing) -> None:
        self._pausing = pausing

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the commands by name."""
        return {**{how: partial(self.step, how) for how in STEPS}, "continue": self.go_on}

    def step(self, how: str, words: list[str]) -> None:
        """Let paused ranks continue until the end of a step."""
        parsed = parse(how, words)
        mesh, ranks = self._pausing.named(how, list(parsed.words))
        print(stepped(mesh, ranks, how, getattr(parsed, "line", None) or 0))

    def go_on(self, words: list[str]) -> None:
        """Let paused ranks continue."""
        print(resumed(*self._pausing.meant("continue", words)))


def stepped(mesh: Mesh, ranks: Iterable[int], how: str, line: int = 0) -> str:
    """Let paused ranks continue for a step, wait until it has ended, and describe where they are.

    Args:
        mesh: the mesh.
        ranks: the ranks of the mesh.
        how: the command.
        line: for ``until``: the line to stop at.
    """
    answering = MeshAnswering(mesh)
    try:
        return answering.step(answering.procs(ranks), how, line)
    except ArgumentError:
        raise Usage(not_paused(how, mesh, list(ranks))) from None


def not_paused(command: str, mesh: Mesh, ranks: list[int]) -> str:
    """Say that some ranks are not paused, and which are."""
    others = [rank for rank, each in positions(mesh, list(range(len(mesh.procs)))).items() if each.state == "paused"]
    if not others:
        return f"%mesh {command}: no rank of mesh {mesh.name!r} is paused; %mesh pause pauses ranks"
    are = "is" if len(ranks) == 1 else "are"
    paused = f"paused on mesh {mesh.name!r}: {describe_ranks(others)}"
    return f"%mesh {command}: {describe_ranks(ranks)} {are} not paused; {paused}"
