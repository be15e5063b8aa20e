"""The commands of a prompt in a notebook, at a breakpoint or after an error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from monarch._kernel_api import HELP, Reader, split_proc, stops, unknown
from monarch.exceptions import MonarchError
from monarch_kernel.debug.answering import MeshAnswering
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.ranks import ranks_in_words
from monarch_kernel.meshes.mesh import Mesh

_HELP = f"""{HELP}
break PLACE, breaks, clear [N]
                  breakpoints, as for %mesh break
quit              stop the cell; at %mesh debug, leave the prompt"""
_CELL = re.compile(r"cell \[(\d+)\]")
_VERBS = ("break", "breaks", "clear", "forget")


class Commands:
    """Reads and carries out the commands of one prompt, in the thread that asks.

    Args:
        mesh: whose ranks are looked at.
        mesh_command: runs a ``%mesh`` line.
    """

    def __init__(self, mesh: Mesh, mesh_command: Callable[[str], Any]) -> None:
        self._mesh, self._mesh_command = mesh, mesh_command
        self._answering = MeshAnswering(mesh)
        self.read = Reader().read
        """Returns the command of a line, and the rest."""

    def do(self, focus: list[int], word: str, rest: str) -> list[int]:
        """Carry out a command; return the ranks that the next one is for.

        Args:
            focus: the ranks that the command is for.
            word: the command.
            rest: the rest of the line.
        """
        try:
            if word == "rank" and rest:
                return self._choose(rest) or focus
            text = self._answer(self._answering.procs(focus), word, rest) if word else ""
            print(f"{text}\n" if text else "", end="", flush=True)
        except (HeaderError, MonarchError) as error:
            print(error, file=sys.stderr, flush=True)
        return focus

    def _choose(self, text: str) -> list[int]:
        every = range(len(self._mesh.procs))
        ranks = list(every) if text == "all" else ranks_in_words("rank", text, len(self._mesh.procs))
        chosen, why = self._answering.choose(self._answering.procs(ranks))
        if why and text != "all":
            print(why, flush=True)
        return [split_proc(proc)[1] for proc in chosen]

    def _answer(self, procs: list[str], word: str, rest: str) -> str:
        if word == "rank":
            return self._answering.ranks(procs, self._answering.procs(range(len(self._mesh.procs))))
        if word == "help":
            return _HELP
        if word == "vars":
            ranks = ",".join(str(split_proc(proc)[1]) for proc in procs)
            self._mesh_command(f"vars {self._mesh.name} {ranks} {rest}")
            return ""
        if word == "break" and not rest:
            word = "breaks"
        if word == "break" and rest[:1].isdecimal() and ":" not in rest.partition(" ")[0]:
            rest = _in_file(procs[0], rest)
        if word in _VERBS:
            self._mesh_command(f"{word} {rest}")
            return ""
        text = self._answering.answer(procs, word, rest)
        return unknown(word) if text is None else text


def _in_file(proc: str, place: str) -> str:
    """Return a place such as ``3:5`` for a line, as in pdb of the file or cell in which a rank has stopped."""
    stopped = stops().now.get(proc)
    if stopped is None or not stopped.position.frames:
        return place
    file = stopped.position.frames[0].file
    cell = _CELL.fullmatch(file)
    return f"{cell[1] if cell is not None else file}:{place}"
