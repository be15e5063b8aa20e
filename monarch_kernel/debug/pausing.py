"""``%mesh pause``, ``%mesh resume`` and ``%mesh where``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._kernel_api import (
    Position,
    ThreadPosition,
    ask_ranks,
    describe_ranks,
    describe_threads,
    is_tuple,
    known_threads,
    pause_here,
    request,
    resume_here,
    state_of,
    threads_here,
    where_here,
)
from monarch_kernel.debug.grouped import grouped_lines
from monarch_kernel.debug.places import placed
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.ranks import ranks_in_words
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes

_IDLE = "idle; pauses at the start of its next call"
_PAUSING = "in a call; pauses when it returns,"


class Pausing:
    """The commands that pause and resume ranks, and tell where they are.

    Args:
        meshes: the meshes of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes) -> None:
        self._meshes = meshes

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the commands by name."""
        return {"pause": self.pause, "resume": self.resume, "where": self.where}

    def pause(self, words: list[str]) -> None:
        """Stop ranks at their next Python line."""
        print(paused(*self.meant("pause", words)))

    def resume(self, words: list[str]) -> None:
        """Let paused ranks continue."""
        print(resumed(*self.meant("resume", words)))

    def where(self, words: list[str]) -> None:
        """Show where ranks are."""
        parsed = parse("where", words)
        named: list[str] = list(parsed.words)
        shown = threads if parsed.threads else where
        print(shown(*self.named("where", named)))

    def meant(self, command: str, words: list[str]) -> tuple[Mesh, list[int]]:
        """Return the mesh and the ranks in the words of a command; all ranks if none is named."""
        parsed: list[str] = list(parse(command, words).words)
        return self.named(command, parsed)

    def named(self, command: str, words: list[str]) -> tuple[Mesh, list[int]]:
        """Return the mesh and the ranks that words name, as in ``mesh 0,2``, ``mesh[0:2]`` or ``[0:2]``."""
        if words and "[" in words[0]:
            name, _, rest = words[0].partition("[")
            words[:1] = [word for word in (name, f"[{rest}") if word]
        mesh = self._meshes.get(words.pop(0) if words and words[0].isidentifier() else None)
        return mesh, ranks_in_words(command, " ".join(words), len(mesh.procs)) if words else list(
            range(len(mesh.procs))
        )


def paused(mesh: Mesh, ranks: list[int], resume: str = "%mesh resume") -> str:
    """Pause ranks, and describe where they are.

    Args:
        mesh: the mesh.
        ranks: the ranks of the mesh.
        resume: what resumes them, for the text.
    """
    found = _positions(ask_ranks(state_of(mesh.procs).procs, ranks, request(pause_here)))
    stopped = [rank for rank, position in found.items() if position.state == "paused"]
    head = f"mesh {mesh.name!r}: no rank is paused yet"
    if any(position.state not in ("pausing", "idle") for position in found.values()):
        # The last error of an idle rank is shown in the place of its state.
        head += f"; idle ranks pause at the start of their next call, unless you run {resume}"
    if stopped:
        head = f"paused {describe_ranks(stopped)} of mesh {mesh.name!r}; {resume} lets {_it(stopped)} continue"
    return f"{head}\n{_lines(found, innermost=True)}"


def resumed(mesh: Mesh, ranks: list[int]) -> str:
    """Let ranks continue, and describe which."""
    # The frames of the code change.
    mesh.frame = 0
    answers = ask_ranks(state_of(mesh.procs).procs, ranks, request(resume_here))
    were = [rank for rank, answer in answers.items() if answer is True]
    unknown = {rank: str(answer) for rank, answer in answers.items() if not isinstance(answer, bool)}
    text = f"resumed {describe_ranks(were)}" if were else f"no rank of mesh {mesh.name!r} was paused"
    return f"{text}\n{grouped_lines(unknown.items())}" if unknown else text


def where(mesh: Mesh, ranks: list[int]) -> str:
    """Return the stacks of ranks, paused or not; equal ones are shown once."""
    return _lines(positions(mesh, ranks), level=mesh.frame)


def threads(mesh: Mesh, ranks: list[int]) -> str:
    """Return the stacks of all Python threads of ranks; equal ones are shown once."""
    answers = ask_ranks(state_of(mesh.procs).procs, ranks, request(threads_here))
    found = {rank: known_threads(answer) for rank, answer in answers.items()}
    return describe_threads({rank: _placed(each) if each else str(answers[rank]) for rank, each in found.items()})


def _placed(found: tuple[ThreadPosition, ...]) -> list[ThreadPosition]:
    """Return threads with the names of cells that the user knows."""
    return [each._replace(frames=tuple(placed(Position("", list(each.frames))).frames)) for each in found]


def positions(mesh: Mesh, ranks: list[int]) -> dict[int, Position]:
    """Return where ranks are, paused or not."""
    return _positions(ask_ranks(state_of(mesh.procs).procs, ranks, request(where_here)))


def _it(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _positions(answers: dict[int, Any]) -> dict[int, Position]:
    return {
        rank: Position.unpacked(answer) if is_tuple(answer) else Position(str(answer), [])
        for rank, answer in sorted(answers.items())
    }


def _lines(found: dict[int, Position], innermost: bool = False, level: int = 0) -> str:
    return grouped_lines((rank, _text(_shown(position, innermost), level)) for rank, position in found.items())


def _text(position: Position, level: int) -> str:
    """Return a position as text, with a mark at the selected frame if it is not the innermost one."""
    lines = str(position).splitlines()
    if not 0 < level < len(position.frames):
        return "\n".join(lines)
    return "\n".join([lines[0], *(f"{'>' if at == level else ' '} {line}" for at, line in enumerate(lines[1:]))])


def _shown(position: Position, innermost: bool) -> Position:
    if position.state == "pausing":
        position = position._replace(state=_PAUSING)
    elif position.state == "idle" and innermost:
        position = position._replace(state=_IDLE)
    return placed(position._replace(frames=position.frames[:1]) if innermost else position)
