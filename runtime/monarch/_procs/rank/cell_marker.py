"""The cell line that a rank runs, and whether it ends on request: in a file that its host agent reads after its end."""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

from monarch._core.causes import CellRef

_FORM = struct.Struct("qq")
_SIZE = _FORM.size
_SHIFT = 32
_STOPPED = -0x73746F70706564
"""In place of a line: the process ends because its owner stopped it. No line of a cell is negative."""


class Last(NamedTuple):
    """The contents of a dead process's marker file."""

    place: CellRef | None
    """The cell line that it ran; None if none."""
    stopped: bool
    """Whether it ended because its owner stopped it."""
    stderr: int = 0
    """Bytes of its standard error when its last cell began; 0 if it ran none."""


class Mark:
    """The marker file of this process. An update costs one store to memory."""

    def __init__(self, folder: str, proc: str) -> None:
        self.slot = memoryview(_memory(_path(folder, proc))).cast("q")
        """The result of ``at``, or 0 between cells; the size of stderr when the last cell began."""

    def begin(self) -> None:
        """Note that a cell begins."""
        try:
            self.slot[1] = os.fstat(2).st_size
        except OSError:
            # The code of the user has closed it.
            self.slot[1] = 0

    @staticmethod
    def at(cell: int, line: int) -> int:
        """Encode a cell line as one number."""
        return (cell << _SHIFT) + line


def _memory(path: str) -> mmap.mmap:
    """Map a file. If there is no room for it, use private memory: cells run all the same."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A store to a page without room on disk would kill the process by SIGBUS.
            os.posix_fallocate(fd, 0, _SIZE)
            return mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
    except OSError:
        return mmap.mmap(-1, _SIZE)


def mark_stopped(folder: str, proc: str) -> None:
    """Note that this process ends on request. An exit code would not do: any program may use it."""
    fd = os.open(_path(folder, proc), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, _FORM.pack(_STOPPED, 0), 0)
    finally:
        os.close(fd)


def take_mark(folder: str, proc: str) -> Last:
    """Return the last marker of a dead process; its file is removed."""
    path = _path(folder, proc)
    try:
        with open(path, "rb") as file:
            data = file.read(_SIZE)
        os.unlink(path)
    except OSError:
        return Last(None, False)
    return _last(data)


def read_mark(folder: str, proc: str) -> CellRef | None:
    """Return the cell line that a living process of this host runs, as far as it is marked; None if it is not known."""
    try:
        with open(_path(folder, proc), "rb") as file:
            return _last(file.read(_SIZE)).place
    except OSError:
        return None


def _last(data: bytes) -> Last:
    value, stderr = _FORM.unpack(data) if len(data) == _SIZE else (0, 0)
    place = CellRef(value >> _SHIFT, value & ((1 << _SHIFT) - 1)) if value > 0 else None
    return Last(place, value == _STOPPED, stderr)


def _path(folder: str, proc: str) -> str:
    return f"{folder}/{proc.partition('/')[2]}.at"
