"""The lines of the program that issue ops: found at each op, numbered once."""

from __future__ import annotations

import linecache
import os
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from monarch._python.frames import caller

_MONARCH = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN = (_MONARCH, os.path.dirname(torch.__file__), "<frozen ", "<string>")
"""Code that is not the user's."""


class ProgramLine(NamedTuple):
    """A line of the program."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f'File "{self.file}", line {self.number}, in {self.function}' + (f"\n    {text}" if text else "")


class ProgramLines:
    """The lines that have issued ops. Any thread adds; entries never change."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._lines: list[ProgramLine] = [ProgramLine("<unknown>", 0, "<unknown>")]
        self._is_own: dict[CodeType, bool] = {}

    def here(self) -> int:
        """Return the number of the line of the user's code that runs now; 0 for none."""
        frame: FrameType | None = caller(2)
        known = self._is_own
        while frame is not None:
            code = frame.f_code
            own = known.get(code)
            if own is None:
                own = known[code] = code.co_filename.startswith(_OWN)
            if not own:
                # Not the code, which is equal for equal lines of two cells.
                key = code.co_filename, code.co_name, frame.f_lineno
                number = self._numbers.get(key)
                return number if number is not None else self._add(key)
            frame = frame.f_back
        return 0

    def _add(self, key: tuple[str, str, int]) -> int:
        file, name, line = key
        # Two threads may add the same line twice, which does no harm.
        self._lines.append(ProgramLine(file, line, name))
        number = self._numbers[key] = len(self._lines) - 1
        return number

    def take(self, line: ProgramLine) -> int:
        """Return a number for a line of another process."""
        self._lines.append(line)
        return len(self._lines) - 1

    def has(self, number: int) -> bool:
        """Return whether a line is known here."""
        return number < len(self._lines)

    def __getitem__(self, number: int) -> ProgramLine:
        return self._lines[number]


lines = ProgramLines()
"""Of this process."""
