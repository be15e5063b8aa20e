"""Where in a cell a rank is, in a file that its host agent reads when the rank has died."""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

_SIZE = 8
_SHIFT = 32


class Place(NamedTuple):
    """A line of a cell."""

    cell: int
    """The number of the cell, as the notebook shows it."""
    line: int

    def text(self) -> str:
        """As in ``at cell [3] line 5``."""
        return f"at cell [{self.cell}] line {self.line}"


class Mark:
    """The file of this process. To say where it is costs a store into memory."""

    def __init__(self, folder: str, proc: str) -> None:
        fd = os.open(_path(folder, proc), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _SIZE)
            self.slot = memoryview(mmap.mmap(fd, _SIZE)).cast("q")
            """Its one element is what ``at`` gives, or 0 between cells."""
        finally:
            os.close(fd)

    @staticmethod
    def at(cell: int, line: int) -> int:
        """A line of a cell as one number."""
        return (cell << _SHIFT) + line


def take_mark(folder: str, proc: str) -> Place | None:
    """Where a process was when it died, and removes its file; None if it ran no cell."""
    path = _path(folder, proc)
    try:
        with open(path, "rb") as file:
            data = file.read(_SIZE)
        os.unlink(path)
    except OSError:
        return None
    value = struct.unpack("q", data)[0] if len(data) == _SIZE else 0
    return Place(value >> _SHIFT, value & ((1 << _SHIFT) - 1)) if value > 0 else None


def _path(folder: str, proc: str) -> str:
    return f"{folder}/{proc.partition('/')[2]}.at"
