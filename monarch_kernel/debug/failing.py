"""``%mesh debug`` and ``%mesh forget``: look into the last error of ranks, or forget it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from monarch._kernel_api import (
    Position,
    ask_ranks,
    describe_ranks,
    forget_here,
    is_tuple,
    request,
    state_of,
    where_here,
)
from monarch_kernel.compat import debugger_of, set_debugger
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.debug.prompt import STANDING, Prompt
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.cell_errors import MeshCellError


class Failing:
    """The commands about the last error of ranks.

    Args:
        pausing: the commands beside these, which find the ranks that are meant.
        prompt: asks what to look at.
    """

    def __init__(self, pausing: Pausing, prompt: Prompt) -> None:
        self._pausing = pausing
        self._prompt = prompt

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the commands by name."""
        return {"debug": self.debug, "forget": self.forget}

    def debug(self, words: list[str]) -> None:
        """Look into ranks that have failed or are paused, at a prompt."""
        mesh, ranks = self._pausing.named("debug", list(parse("debug", words).words))
        chosen = standing(mesh, ranks)
        if not chosen:
            others = standing(mesh, list(range(len(mesh.procs)))) if len(ranks) < len(mesh.procs) else []
            if others:
                are = "is" if len(ranks) == 1 else "are"
                raise Usage(
                    f"%mesh debug: {describe_ranks(ranks)} did not fail in the last call and {are} not paused; choose "
                    f"from {describe_ranks(others)} of mesh {mesh.name!r}"
                )
            raise Usage(
                f"%mesh debug: no rank of mesh {mesh.name!r} failed in its last call or is paused; %mesh pause "
                f"pauses ranks"
            )
        self._prompt.look(mesh, chosen)

    def forget(self, words: list[str]) -> None:
        """Let go of the frames of the last error, and of all tensors in them."""
        mesh, ranks = self._pausing.named("forget", list(parse("forget", words).words))
        answers = ask_ranks(state_of(mesh.procs).procs, ranks, request(forget_here))
        had = [rank for rank, answer in answers.items() if answer is True]
        print(f"{describe_ranks(had)}: released the last error" if had else "no error to release")


def standing(mesh: Mesh, ranks: list[int]) -> list[int]:
    """Return the ranks that have failed or are paused, of some."""
    answers = ask_ranks(state_of(mesh.procs).procs, ranks, request(where_here))
    return [
        rank for rank, each in sorted(answers.items()) if is_tuple(each) and Position.unpacked(each).state in STANDING
    ]


def take_debug(shell: Any, debug: Callable[[], None], meshes: NotebookMeshes) -> None:
    """Let ``%debug`` look into the ranks after a ``%%mesh`` cell has failed; ``set_debugger`` undoes it."""
    before = debugger_of(shell)

    def debugger(force: bool) -> None:
        error = getattr(sys, "last_value", None)
        if not isinstance(error, MeshCellError) or not meshes.by_name:
            before(force)
            return
        print("the last cell failed on ranks; starting %mesh debug")
        debug()

    set_debugger(shell, debugger)
