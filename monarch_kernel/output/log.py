"""The output of ranks, up to a bound: the newest part in memory, the older in an unnamed file."""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from threading import Lock
from typing import IO, NamedTuple

from monarch._kernel_api import left_out, parse_ranks

VARIABLE = "MONARCH_LOG_LIMIT_MB"
TOTAL_MB = 128
"""Megabytes of output that are kept in total, unless the variable above sets another number."""
_MEMORY = 4 << 20
"""Characters that are kept in memory."""
_READ = 1 << 20
_CELL = re.compile("^\x1e(\\d+)(?:;([oe]);([^\x1f]*))?\x1f", re.M)
"""Before lines in the log: the number of the cell that printed them, and the following lines, stream and mesh."""
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_RANKS = re.compile(r"\[ranks? ([0-9,-]+)\] ")


class LoggedLine(NamedTuple):
    """A line of the log."""

    mesh: str
    """Uid of the mesh; empty if unknown."""
    ranks: tuple[int, ...]
    stream: str
    text: str
    cell: int


class _Segment:
    """An unnamed file of older output, which disappears with this process."""

    def __init__(self) -> None:
        # Stays open as long as the segment exists: a reader may still have a dropped one.
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="monarch-log-")  # noqa: SIM115
        weakref.finalize(self, self.file.close)
        self.size = 0
        self.lines = 0
        self.characters = 0

    def write(self, text: str) -> None:
        """Append text."""
        data = text.encode("utf-8", "surrogatepass")
        self.file.write(data)
        self.file.flush()
        self.size += len(data)
        self.lines += text.count("\n")
        self.characters += len(text)


class OutputLog:
    """The output of ranks, for ``%mesh log``. Beyond the bound, the oldest is dropped and counted.

    Args:
        memory: characters that are kept in memory.
        total: bytes that are kept in files.
    """

    def __init__(self, memory: int = _MEMORY, total: int | None = None) -> None:
        self._memory = memory
        self._total = _total() if total is None else total
        # All guarded by _lock, which is held while a file is read or written.
        self._lock = Lock()
        self._recent: deque[str] = deque()
        self._recent_size = 0
        self._segments: deque[_Segment] = deque()
        self.lines_lost = 0
        """Dropped lines."""
        self.characters_lost = 0
        """Dropped characters."""

    def add(self, text: str, cell: int | None = None, stream: str = "stdout", mesh: str = "") -> None:
        """Add a text of whole lines.

        Args:
            text: each line begins with its ranks.
            cell: number of the cell that printed it; None if none did.
            stream: ``stdout`` or ``stderr``.
            mesh: uid of the mesh of the ranks.
        """
        if cell is not None or mesh:
            text = f"\x1e{cell or 0};{'e' if stream == 'stderr' else 'o'};{mesh}\x1f{text}"
        with self._lock:
            self._recent.append(text)
            self._recent_size += len(text)
            if self._recent_size > self._memory:
                self._spill()

    def _spill(self) -> None:
        """Move the older half of the text in memory to a file."""
        while self._recent and self._recent_size > self._memory // 2:
            text = self._recent.popleft()
            self._recent_size -= len(text)
            try:
                if not self._segments or self._segments[-1].size >= self._total // 2:
                    self._segments.append(_Segment())
                    if len(self._segments) > 2:
                        self._forget()
                self._segments[-1].write(text)
            except OSError:
                # No room for it on the disk.
                self.lines_lost += text.count("\n")
                self.characters_lost += len(text)

    def _forget(self) -> None:
        oldest = self._segments.popleft()
        self.lines_lost += oldest.lines
        self.characters_lost += oldest.characters
        oldest.file.close()

    def read(self) -> Iterator[str]:
        """Yield the kept output in pieces, oldest first; the first piece counts what was dropped."""
        return (_CELL.sub("", piece) for piece in self._read())

    def lines(self, ranks: Collection[int] = (), cell: int | None = None, mesh: str = "") -> Iterator[str]:
        """Yield the lines of ranks, a cell or a mesh, oldest first; of all if there are none.

        Args:
            ranks: the ranks.
            cell: the number of the cell.
            mesh: the uid of the mesh.
        """
        now, of = None, ""
        for piece in self._read():
            # Not splitlines, which takes other characters for ends of lines too.
            for line in _LINE.findall(piece):
                mark = _CELL.match(line)
                if mark is not None:
                    now, of, line = int(mark[1]), mark[3] or "", line[mark.end() :]
                if cell in (None, now) and mesh in ("", of) and (not ranks or not _ranks_of(line).isdisjoint(ranks)):
                    yield line

    def newest(
        self, wanted: Callable[[LoggedLine], bool], most: int, whole: bool = True
    ) -> tuple[list[LoggedLine], bool]:
        """Return the newest lines that are wanted, oldest first, and whether there are older ones.

        Args:
            wanted: tells whether a line is.
            most: how many.
            whole: whether to look at the older output in files too, which takes longer.
        """
        with self._lock:
            recent, older = list(self._recent), bool(self._segments)
        found: list[LoggedLine] = []
        for text in reversed(recent):
            found += filter(wanted, reversed(_parsed([text])))
            if len(found) > most:
                return found[:most][::-1], True
        if not whole or not older:
            return found[::-1], older
        # The pieces of files begin where lines do; what is in memory comes after them again.
        lines = deque((line for line in _iter_parsed(self._read()) if wanted(line)), most + 1)
        return list(lines)[-most:] if most else [], len(lines) > most

    def _read(self) -> Iterator[str]:
        if self.characters_lost:
            yield f"… {left_out(self.lines_lost, self.characters_lost)} dropped\n"
        with self._lock:
            segments, recent = [(each, each.size) for each in self._segments], list(self._recent)
        for segment, size in segments:
            yield from self._read_segment(segment, size)
        yield from recent

    def _read_segment(self, segment: _Segment, size: int) -> Iterator[str]:
        position = 0
        rest = b""
        while position < size:
            with self._lock:
                if segment.file.closed:
                    yield "… some output is missing here: it was dropped while being read\n"
                    return
                data = os.pread(segment.file.fileno(), min(_READ, size - position), position)
            position += len(data)
            if not data:
                break
            whole, newline, rest_of_it = (rest + data).rpartition(b"\n")
            rest = rest_of_it
            yield (whole + newline).decode("utf-8", "surrogatepass")
        yield rest.decode("utf-8", "surrogatepass")


def _iter_parsed(pieces: Iterable[str]) -> Iterator[LoggedLine]:
    cell, stream, mesh = 0, "stdout", ""
    for piece in pieces:
        for line in _LINE.findall(piece):
            mark = _CELL.match(line)
            if mark is not None:
                cell, stream, mesh = int(mark[1]), "stderr" if mark[2] == "e" else "stdout", mark[3] or ""
                line = line[mark.end() :]
            prefix = _RANKS.match(line)
            ranks = parse_ranks(prefix[1]) if prefix is not None else []
            yield LoggedLine(mesh, tuple(ranks), stream, line[prefix.end() if prefix else 0 :].rstrip("\n"), cell)


def _parsed(pieces: Iterable[str]) -> list[LoggedLine]:
    return list(_iter_parsed(pieces))


def ending(pieces: Iterable[str], characters: int) -> Iterator[str]:
    """Yield the end of an output, after a line that counts what is not shown."""
    last: deque[str] = deque()
    size = lines = skipped = 0
    for piece in pieces:
        last.append(piece)
        size += len(piece)
        while size - len(last[0]) > characters:
            oldest = last.popleft()
            size -= len(oldest)
            lines, skipped = lines + oldest.count("\n"), skipped + len(oldest)
    if skipped:
        yield (
            f"… {left_out(lines, skipped)} before this are not shown; select lines with --tail N, --rank RANKS or "
            f"--cell N, or write all of them with --save FILE\n"
        )
    yield from last


def _ranks_of(line: str) -> set[int]:
    found = _RANKS.match(line)
    return set(parse_ranks(found[1])) if found is not None else set()


def _total() -> int:
    text = os.environ.get(VARIABLE, "")
    return (int(text) if text.isdecimal() and int(text) else TOTAL_MB) << 20
