"""What ranks print, as the program shows it: tagged with the ranks, and once for all that say the same."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable
from threading import RLock

from monarch._actors.procs import split_proc
from monarch._actors.runtime import Runtime
from monarch._core.fold import Folder, Line
from monarch._wire import messages as m

_WINDOW = 0.1
"""Seconds for which a line waits for equal ones of other ranks, unless its call ends before."""


class OutputView:
    """Collects the output of all ranks of a session.

    ``on_line`` gets each line, folded; its ``source`` is the uid of the procs, the key of the actor, and the port of
    the call that was running. By default lines go to this process's stdout and stderr.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._folders: dict[float, Folder] = {_WINDOW: Folder(_WINDOW)}
        self._windows: dict[str, float] = {}
        self._silent: set[str] = set()
        self._seen: dict[tuple[str, str], int] = {}
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}
        self._sources: dict[int, set[tuple[str, str, int]]] = {}
        self._lock = RLock()
        self._timed = False
        self.on_line: Callable[[Line], None] = show
        runtime.on_output = self.take
        runtime.on_done = self.done
        runtime.output_options = self.configure

    def configure(self, uid: str, shown: bool, window: float | None) -> None:
        """Says whether the output of some procs is shown, and how long equal lines are awaited."""
        with self._lock:
            self._silent.discard(uid)
            if not shown:
                self._silent.add(uid)
            self._windows[uid] = _WINDOW if window is None else window
            self._folders.setdefault(self._windows[uid], Folder(self._windows[uid]))

    def take(self, output: m.Output) -> None:
        """Takes what a rank has printed."""
        port = output.port if output.caller == self._runtime.proc else 0
        self.add(output.src, (split_proc(output.src)[0], output.actor, port), output.pieces)

    def add(self, proc: str, source: tuple[str, str, int], pieces: list[tuple[str, int, bytes]]) -> None:
        """Takes pieces of a proc's streams; what was taken before is left out."""
        now = time.monotonic()
        with self._lock:
            folder = self._folders[self._windows.get(source[0], _WINDOW)]
            for stream, offset, data in pieces:
                where = (proc, stream)
                seen = self._seen.get(where, 0)
                self._seen[where] = max(seen, offset + len(data))
                fresh = data[max(0, seen - offset) :]
                if not fresh or source[0] in self._silent:
                    continue
                rank = split_proc(proc)[1]
                if offset > seen:
                    folder.add(source, rank, stream, f"\n[{offset - seen:,} bytes of output were lost here]\n", now)
                decoder = self._decoders.get(where)
                if decoder is None:
                    decoder = self._decoders[where] = codecs.getincrementaldecoder("utf-8")("replace")
                folder.add(source, rank, stream, decoder.decode(fresh), now)
            port = source[2]
            if port in self._runtime.ports:
                self._sources.setdefault(port, set()).add(source)
            elif port and not all(data.endswith(b"\n") for _, _, data in pieces):
                # Its call has ended, so nothing else will have the rest of the line shown.
                self._sources.setdefault(port, set()).add(source)
                self.done(port)
        self._time()

    def done(self, port: int) -> None:
        """A call has ended: what it printed is shown now."""
        if port in self._sources:
            with self._lock:
                for source in self._sources.pop(port, ()):
                    for folder in self._folders.values():
                        self._emit(folder.flush(source))

    def ended(self, dead: m.Dead) -> None:
        """The last words of a proc that has died."""
        if dead.tails:
            self.add(dead.proc, (split_proc(dead.proc)[0], "", 0), dead.tails)
        with self._lock:
            for stream in ("stdout", "stderr"):
                self._decoders.pop((dead.proc, stream), None)

    def flush(self) -> None:
        """Shows all that waits."""
        with self._lock:
            for folder in self._folders.values():
                self._emit(folder.flush())

    def _time(self) -> None:
        if not self._timed:
            self._timed = True
            self._runtime.pump.call_later(min(self._folders) or 0.01, self._due)

    def _due(self) -> None:
        self._timed = False
        now = time.monotonic()
        with self._lock:
            for folder in self._folders.values():
                self._emit(folder.due(now))
            waiting = any(folder.next_due() is not None for folder in self._folders.values())
        if waiting:
            self._time()

    def _emit(self, lines: list[Line]) -> None:
        for line in lines:
            self.on_line(line)


def show(line: Line) -> None:
    """Writes a line to stdout or stderr of this process."""
    file = sys.stderr if line.stream == "stderr" else sys.stdout
    if file is not None:
        try:
            file.write(f"{line.prefix()} {line.text}\n")
            file.flush()
        except (OSError, ValueError):
            # The program has closed it, so nobody wants to read this.
            pass
