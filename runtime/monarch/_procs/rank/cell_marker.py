"""Where in a cell a rank is, and whether it ends as it was told to: in a file that its host agent reads in the end."""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

from monarch._core.causes import CellRef

_SIZE = 8
_SHIFT = 32
_STOPPED = -0x73746F70706564
"""In place of a line: the process ends since its owner has stopped it. No line of a cell is negative."""


class Last(NamedTuple):
    """What the file of a process says when the process has died."""

    place: CellRef | None
    """Where in a cell it was; None if it ran none."""
    stopped: bool
    """Whether it has ended since its owner has stopped it."""


class Mark:
    """The file of this process. To say where it is costs a store into memory."""

    def __init__(self, folder: str, proc: str) -> None:
        self.slot = memoryview(_memory(_path(folder, proc))).cast("q")
        """Its one element is what ``at`` gives, or 0 between cells."""

    @staticmethod
    def at(cell: int, line: int) -> int:
        """A line of a cell as one number."""
        return (cell << _SHIFT) + line


def _memory(path: str) -> mmap.mmap:
    """A file as memory. Where there is no room for it, memory that nobody else sees: cells run all the same."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A store to a page that the disk has no room for would end the process by SIGBUS.
            os.posix_fallocate(fd, 0, _SIZE)
            return mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
    except OSError:
        return mmap.mmap(-1, _SIZE)


def mark_stopped(folder: str, proc: str) -> None:
    """Notes that this process ends because it was told to. An exit code would not do: any program may have that too."""
    fd = os.open(_path(folder, proc), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, struct.pack("q", _STOPPED), 0)
    finally:
        os.close(fd)


def take_mark(folder: str, proc: str) -> Last:
    """What a process that has died has noted last; its file is removed."""
    path = _path(folder, proc)
    try:
        with open(path, "rb") as file:
            data = file.read(_SIZE)
        os.unlink(path)
    except OSError:
        return Last(None, False)
    value = struct.unpack("q", data)[0] if len(data) == _SIZE else 0
    place = CellRef(value >> _SHIFT, value & ((1 << _SHIFT) - 1)) if value > 0 else None
    return Last(place, value == _STOPPED)


def _path(folder: str, proc: str) -> str:
    return f"{folder}/{proc.partition('/')[2]}.at"
