"""Cells by the names that front ends and ranks have for them.

A front end names a cell by a file whose name is a hash of its text, header included. The ranks have compiled the part
below the header as ``cell [3]``; a class of actors is compiled in the notebook, under a hash of that part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from monarch_kernel.compat import file_of_cell
from monarch_kernel.dap.protocol import Message
from monarch_kernel.debug.breaks import code_lines
from monarch_kernel.debug.front_end import FrontEnd

_ON_RANKS = re.compile(r"\s*(?:%%\w.*\n\s*)*%%mesh\b")
"""The beginning of a cell that runs on ranks, perhaps below other magics."""


class Sources:
    """The files of cells. Control thread only, but for ``places``, which the threads of cells use too.

    Args:
        front_end: returns the cells that have run.
    """

    def __init__(self, front_end: Callable[[], FrontEnd]) -> None:
        self._front_end = front_end
        # Single operations.
        self._paths: dict[str, str] = {}
        """By text of a cell, its file."""
        self._dumped: dict[str, str] = {}
        """By file, the text of a cell that the front end has announced."""

    def path_of(self, text: str) -> str:
        """Return the file of a cell."""
        path = self._paths.get(text)
        if path is None:
            path = self._paths[text] = file_of_cell(text)
        return path

    def dumped(self, path: str, text: str) -> None:
        """Note the file of a cell."""
        self._dumped[path] = text
        self._paths[text] = path

    def runs_on_ranks(self, path: str) -> bool:
        """Return whether a file is of a cell that begins with ``%%mesh``."""
        return _ON_RANKS.match(self._dumped.get(path, "")) is not None

    def places(self, path: str, line: int) -> list[tuple[str, int]]:
        """Return the files and lines of a line, as ranks know them."""
        found = [(path, line)]
        for name, ran in list(self._front_end().cells.items()):
            if self.path_of(ran.text) == path and line > ran.above:
                found.append((name, line - ran.above))
        for text, code in self._spawns(path):
            if self.path_of(text) == path:
                above = text.rstrip("\n").removesuffix(code.rstrip("\n")).count("\n")
                found += [(file_of_cell(each), line - above) for each in {code, code.rstrip("\n")} if line > above]
        return found

    def located(self, file: str, line: int) -> tuple[str, int, str]:
        """Return the file and line of a line of a rank as the front end knows them, and a name for people."""
        ran = self._front_end().cells.get(file)
        if ran is not None:
            path = self.path_of(ran.text)
            self._write(path, ran.text)
            return path, line + ran.above, file
        for text, code in list(self._front_end().spawned.items()):
            if file in (file_of_cell(code), file_of_cell(code.rstrip("\n"))):
                path = self.path_of(text)
                self._write(path, text)
                return path, line + text.rstrip("\n").removesuffix(code.rstrip("\n")).count("\n"), "cell"
        return file, line, os.path.basename(file)

    def moved(self, path: str, line: int) -> int | None:
        """Return the first line with code at or after a line of a cell on ranks; None if no such line exists."""
        text = self._dumped.get(path, "")
        above = _above(text)
        lines = {each + above for each in code_lines("\n".join(text.splitlines()[above:]))}
        if not lines:
            # Magics and shell commands are no Python: their lines are not known here.
            return line if line > above else None
        return min((each for each in lines if each >= line), default=None)

    def _spawns(self, path: str) -> list[tuple[str, str]]:
        known = dict(self._front_end().spawned)
        text = self._dumped.get(path, "")
        if text and text not in known and text.startswith("%%mesh spawn"):
            known[text] = text.partition("\n")[2]
        return list(known.items())

    @staticmethod
    def _write(path: str, text: str) -> None:
        """Write the file of a cell that the front end has not announced, which may ask for it."""
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")


def source_of(path: str, name: str, number: int) -> Message:
    """Return the ``Source`` of a frame; a number is for a file that only a rank can read."""
    return {"name": name, "path": path, **({"sourceReference": number} if number else {})}


def _above(text: str) -> int:
    """Return the lines down to the ``%%mesh`` of a cell."""
    for at, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("%%mesh"):
            return at
    return 0
