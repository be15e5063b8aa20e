"""``%mesh frame``: the frame of the paused or running code that ``print``, ``vars`` and ``diff`` look at."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import RUNNING, Position
from monarch_kernel.debug.grouped import grouped_lines
from monarch_kernel.debug.pausing import Pausing, positions
from monarch_kernel.debug.places import placed
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh


class FrameCommand:
    """The command that selects a frame; each mesh has one selection, until its ranks are resumed.

    Args:
        pausing: the commands beside it, which find the mesh that is meant.
    """

    def __init__(self, pausing: Pausing) -> None:
        self._pausing = pausing

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the command by name."""
        return {"frame": self.frame}

    def frame(self, words: list[str]) -> None:
        """Select a frame, and show the stacks with a mark at it."""
        given: list[str] = list(parse("frame", words).words)
        change = given.pop() if given and (given[-1] in ("up", "down") or given[-1].lstrip("-").isdigit()) else ""
        mesh, ranks = self._pausing.named("frame", given)
        found = positions(mesh, ranks)
        depth = max((len(each.frames) for each in found.values()), default=0)
        if change:
            mesh.frame = _checked(_wanted(mesh.frame, change), depth, mesh)
        print(grouped_lines((rank, _numbered(position, mesh.frame)) for rank, position in found.items()))


def _wanted(now: int, change: str) -> int:
    return now + {"up": 1, "down": -1}[change] if change in ("up", "down") else int(change)


def _checked(wanted: int, depth: int, mesh: Mesh) -> int:
    if depth == 0:
        raise Usage(f"%mesh frame: the ranks of mesh {mesh.name!r} are idle; run a cell, then %mesh pause")
    if not 0 <= wanted < depth:
        raise Usage(f"%mesh frame: expected a frame from 0 (innermost) to {depth - 1}, got {wanted}")
    return wanted


def _numbered(position: Position, level: int) -> str:
    """Return a stack with numbers, and a mark at the selected frame."""
    frames = placed(position).frames
    lines = [f"{'>' if at == level else ' '} {at}  {frame}" for at, frame in enumerate(frames)]
    state = str(position._replace(frames=[]))
    return "\n".join([f"{state}; its frames may change" if frames and position.state == RUNNING else state, *lines])
