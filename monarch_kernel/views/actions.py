"""The buttons of a view: each runs the code of a command of ``%mesh`` in a thread of its own, and answers with Done."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import Peek, ask_soon, describe_ranks, in_thread, is_tuple, open_node, request, state_of
from monarch._kernel_api import peek_here as peek
from monarch.exceptions import MonarchError
from monarch_kernel.commands.elastic import healed
from monarch_kernel.commands.interrupt import Interrupting
from monarch_kernel.commands.kill import Killing
from monarch_kernel.debug.pausing import paused, resumed
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.views.details import short_stack
from monarch_kernel.views.protocol import Act, Action, Done

OFFERED: list[Action] = ["interrupt", "pause", "resume", "heal", "kill", "stacks"]
"""Actions for the meshes of a notebook."""
_PATIENCE = 2.0
"""Seconds for the ranks to say where they are."""


class Actions:
    """Runs the actions of views.

    Args:
        killing: the command that kills ranks.
        interrupting: the command that interrupts them.
        write: shows a line in the notebook, for what an action says before its end.
    """

    def __init__(self, killing: Killing, interrupting: Interrupting, write: Callable[[str], object]) -> None:
        self._killing = killing
        self._interrupting = interrupting
        self._write = write

    def run(self, mesh: Mesh, act: Act, tell: Callable[[Done], object]) -> None:
        """Begin an action, and tell the view its outcome."""
        in_thread(open_node(), "view action", lambda: tell(self._outcome(mesh, act)))

    def _outcome(self, mesh: Mesh, act: Act) -> Done:
        try:
            ranks = _existing(mesh, act.ranks)
            return Done(act.id, True, self._done(mesh, act.action, ranks))
        except (MonarchError, HeaderError) as error:
            return Done(act.id, False, str(error))
        except Exception as error:
            return Done(act.id, False, f"{type(error).__name__}: {error}")

    def _done(self, mesh: Mesh, action: Action, ranks: list[int]) -> str:
        match action:
            case "interrupt":
                return self._interrupting.stop(mesh, set(ranks), self._write)
            case "pause":
                return paused(mesh, ranks, "the Resume button")
            case "resume":
                return resumed(mesh, ranks)
            case "heal":
                return "\n".join(healed(mesh))
            case "kill":
                return "\n".join(self._killing.killed(mesh, ranks))
            case "stacks":
                return stacks_text(mesh, ranks)


def _existing(mesh: Mesh, ranks: list[int]) -> list[int]:
    """Return the ranks that are meant; all if none is named.

    Raises:
        HeaderError: the mesh has no such rank.
    """
    missing = [rank for rank in ranks if not 0 <= rank < len(mesh.procs)]
    if missing:
        raise HeaderError(f"mesh {mesh.name!r} has no {describe_ranks(missing)}")
    return sorted(set(ranks)) or list(range(len(mesh.procs)))


def stacks_text(mesh: Mesh, ranks: list[int]) -> str:
    """Return the stacks of ranks, which run on meanwhile; equal ones are shown once."""
    procs, node = state_of(mesh.procs).procs, open_node()
    living = [proc for proc in map(procs.proc, ranks) if node.peers.get(proc).dead is None]
    answers = ask_soon(living, request(peek, False, False), _PATIENCE)
    stacks: dict[str, list[int]] = {}
    for rank in ranks:
        answer = answers.get(procs.proc(rank))
        text = (
            "\n".join(f"  {line}" for line in short_stack(Peek(*answer).stack)) if is_tuple(answer) else "  no answer"
        )
        stacks.setdefault(text, []).append(rank)
    return "\n".join(f"{describe_ranks(ranks)}:\n{text}" for text, ranks in stacks.items())
