"""Output of ranks as the output thread holds it: decoded, folded, and waiting to be shown."""

from __future__ import annotations

import codecs
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from monarch._core.roster import split_proc
from monarch._core.text.cpp_frames import without_cpp_frames
from monarch._core.text.folding.blocks import Block, OutputLine, merge_blocks
from monarch._core.text.folding.folder import Folder
from monarch._node.node import Node
from monarch._node.services.frame import send_to_all
from monarch._procs.agent.merging import outputs_of
from monarch._procs.rank.output import cost_of
from monarch._session.shown_lines import in_units, show, show_blocks
from monarch._wire import messages as m

WINDOW = 0.1
"""Seconds that a line waits for equal ones of other ranks, unless its call ends earlier."""
_CREDIT_STEP = 64 << 10
"""Cost of a rank's output after which it gets credit."""
_UNFINISHED_S = 0.2
"""Seconds between checks of unfinished lines, such as progress bars."""
_FIRST_S = 0.1
"""Seconds before the first check after a pause, and before the next one if a line has just begun."""
_YOUNG_S = 0.08
"""Seconds for which the end of a line is awaited: print writes it separately."""
_HOLD_S = 2.0
"""The most seconds that output waits for a display that was made before it, whose thread may get no CPU."""

Source = tuple[str, str, int]
"""Uid of the process mesh, key of the actor, and port of the running call."""


class _Gate:
    """Output of a proc that waits until something else is shown. For the output thread only."""

    def __init__(self, shown: threading.Event, deadline: float) -> None:
        self.deadline = deadline
        self.later: list[Callable[[], None]] = []
        self._shown = shown

    def is_open(self, now: float) -> bool:
        """Return whether output need not wait any longer."""
        return self._shown.is_set() or now >= self.deadline


class EndingMesh:
    """A mesh that is ending. For the output thread only."""

    def __init__(self, uid: str, procs: Sequence[str]) -> None:
        self.uid = uid
        self.left = set(procs)
        """Processes whose last output is not taken."""
        self.shown: threading.Event | None = None
        """To be set when all is shown; None while the future of the end is open."""


class FoldedOutput:
    """The output that the output thread has taken and not shown: by mesh, call and process.

    ``on_line`` gets each folded line; its ``source`` is the uid of the process mesh, the key of the actor, and the port
    of the running call. By default lines go to this process's stdout and stderr. ``on_blocks`` gets the same lines in
    blocks that arrived together; by default it calls ``on_line``. Both are called without any lock.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        # All of this: output thread only.
        self._folders: dict[float, Folder] = {WINDOW: Folder(WINDOW)}
        self._windows: dict[str, float] = {}
        self._silent: set[str] = set()
        self._seen: dict[tuple[str, str], int] = {}
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}
        self._cpp_frames = os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "0") == "1"
        self._sources: dict[int, set[Source]] = {}
        self._owed: dict[str, int] = {}
        self._due: list[Block] = []
        self._taken = 0
        self._since = 0
        self._look_at = 0.0
        self._unfinished: dict[Source, list[Block]] = {}
        self._gates: dict[str, _Gate] = {}
        """By proc: output that waits for something else to be shown."""
        self._endings: list[tuple[int, threading.Event]] = []
        """Ended calls whose output may wait there."""
        self._stops: dict[int, EndingMesh] = {}
        """Stopped meshes, by the port of the future of their end."""
        self.on_line: Callable[[OutputLine], None] = show
        self.on_blocks: Callable[[list[Block]], None] = self._by_line
        self.on_unfinished: Callable[[Source, list[Block]], None] | None = None
        """Called with a source and its unfinished lines when they have changed, from time to time. Such lines are of
        another stream once they are finished, see ``PROGRESS`` in ``monarch._core.text.folding.blocks``."""
        self.on_left_out: Callable[[Source, int, int], None] = lambda source, rank, count: None
        """Called with the number of dropped bytes of a rank that was too far ahead."""
        self.on_end: Callable[[int], None] = lambda port: None
        """Called with the port of each call that has printed, once all its output was shown."""

    def _emit(self) -> None:
        if self._due:
            blocks, self._due = self._due, []
            self._safely(lambda: self.on_blocks(merge_blocks(blocks)))

    def _by_line(self, blocks: list[Block]) -> None:
        if self.on_line is show:
            show_blocks(blocks)
            return
        for block in blocks:
            for line in block.lines():
                self.on_line(line)

    def _safely(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            # An error of a callback must not end all output.
            traceback.print_exc()

    def _give_credit(self) -> None:
        """Tell ranks that they may send more."""
        node = self._node
        by_count: dict[int, list[str]] = {}
        for proc, count in list(self._owed.items()):
            if count >= _CREDIT_STEP:
                del self._owed[proc]
                by_count.setdefault(count, []).append(proc)
        for count, procs in by_count.items() if not node.closed else ():
            peers = [node.peers.known.get(proc) or node.peers.get(proc) for proc in procs]
            send_to_all(node, peers, m.encode(m.OutputCredit(node.proc, count)))

    # Queued items

    def _configure(self, uid: str, shown: bool, window: float) -> None:
        self._silent.discard(uid)
        if not shown:
            self._silent.add(uid)
        self._windows[uid] = window
        self._folders.setdefault(window, Folder(window))

    def _take_merged(self, merged: m.MergedOutput, port: int, late: bool) -> None:
        for output in outputs_of(merged):
            self._take(output, port, late)

    def _take(self, output: m.Output, port: int, late: bool) -> None:
        gate = self._gates.get(output.src)
        if gate is not None:
            gate.later.append(lambda: self._take(output, port, late))
            return
        source = (split_proc(output.src)[0], output.actor, port)
        count = self._add(output.src, source, output.pieces)
        self._owed[output.src] = self._owed.get(output.src, 0) + count
        self._taken += count
        if self.on_unfinished is not None and not self._look_at:
            self._look_at = time.monotonic() + _FIRST_S
        if port and not late:
            self._sources.setdefault(port, set()).add(source)
        elif port and not all(data.endswith(b"\n") for _, _, data in output.pieces):
            # Its call has ended, so nothing later would show the rest of the line.
            self._flush_source(source)

    def _add(self, proc: str, source: Source, pieces: Sequence[tuple[str, int, bytes]]) -> int:
        """Add pieces of a proc's streams, without those already taken; return the cost of the others."""
        cost = 0
        now = time.monotonic()
        folder = self._folders[self._windows.get(source[0], WINDOW)]
        folder.marks_progress = self.on_unfinished is not None
        rank = split_proc(proc)[1]
        for stream, offset, data in pieces:
            where = (proc, stream)
            seen = self._seen.get(where, 0)
            self._seen[where] = max(seen, offset + len(data))
            fresh = data[max(0, seen - offset) :]
            cost += cost_of(fresh) if fresh else 0
            if not fresh or source[0] in self._silent:
                continue
            decoder = self._decoders.get(where)
            if decoder is None:
                decoder = self._decoders[where] = codecs.getincrementaldecoder("utf-8")("replace")
            if offset > seen:
                count = offset - seen
                folder.add(source, rank, stream, decoder.decode(b"", True), now)
                decoder.reset()
                folder.end_line(source, rank, stream, now)
                note = f"[{count:,} bytes of output{in_units(count)} omitted here]\n"
                # Outside the folding: different numbers would keep later lines from folding.
                self._due += [*folder.catch_up(source), Block(source, (rank,), stream, note)]
                self.on_left_out(source, rank, count)
            text = decoder.decode(fresh)
            folder.add(source, rank, stream, text if self._cpp_frames else without_cpp_frames(text), now)
        return cost

    def _done(self, port: int, shown: threading.Event) -> None:
        stop = self._stops.get(port)
        if stop is not None and stop.left:
            # The port closes before the last death comes here.
            stop.shown = shown
            return
        if self._gates:
            self._endings.append((port, shown))
            return
        try:
            for source in self._sources.pop(port, ()):
                self._unfinished.pop(source, None)
                self._flush_source(source)
            if stop is not None:
                del self._stops[port]
                for folder in self._folders.values():
                    for source in folder.sources():
                        if source[0] == stop.uid:
                            self._due += folder.flush_blocks(source)
            self._emit()
            self._safely(lambda: self.on_end(port))
        finally:
            self._node.waits.unshown.pop(port, None)
            shown.set()

    def _forget_stop(self, port: int) -> None:
        self._stops.pop(port, None)

    def _flush_source(self, source: Source) -> None:
        for folder in self._folders.values():
            self._due += folder.flush_blocks(source)

    def _ended(self, proc: str, tails: Sequence[tuple[str, int, bytes]], port: int) -> None:
        if tails:
            source = (split_proc(proc)[0], "", port)
            self._add(proc, source, tails)
            if port:
                self._sources.setdefault(port, set()).add(source)
        self._owed.pop(proc, None)
        for stream in ("stdout", "stderr"):
            self._decoders.pop((proc, stream), None)
        for port, stop in list(self._stops.items()):
            stop.left.discard(proc)
            if not stop.left and stop.shown is not None:
                self._done(port, stop.shown)

    def _flush(self, shown: threading.Event) -> None:
        try:
            self._open_gates(True)
            for folder in self._folders.values():
                self._due += folder.flush_blocks()
            self._emit()
        finally:
            shown.set()

    def _hold(self, proc: str, shown: threading.Event) -> None:
        gate = self._gates.get(proc)
        if gate is not None:
            gate.later.append(lambda: self._hold(proc, shown))
        else:
            self._gates[proc] = _Gate(shown, time.monotonic() + _HOLD_S)

    def _open_gates(self, all_of_them: bool = False) -> None:
        """Take the output that need not wait any longer, and end the calls whose output that was."""
        now = time.monotonic()
        while opened := [(proc, each) for proc, each in self._gates.items() if all_of_them or each.is_open(now)]:
            for proc, gate in opened:
                del self._gates[proc]
                for action in gate.later:
                    self._safely(action)
        if not self._gates:
            endings, self._endings = self._endings, []
            for port, shown in endings:
                self._done(port, shown)

    def _catch_up(self, shown: threading.Event, proc: str, ports: Callable[[int], bool]) -> None:
        try:
            # Output that waited for an earlier display comes before the next one.
            self._open_gates()
            for source in [source for sources in self._sources.values() for source in sources]:
                ends = bool(proc) and split_proc(proc)[0] == source[0] and ports(source[2])
                for folder in self._folders.values():
                    for stream in ("stdout", "stderr") if ends else ():
                        folder.end_line(source, split_proc(proc)[1], stream, time.monotonic())
                    self._due += folder.catch_up(source)
            self._emit()
        finally:
            shown.set()

    def _look_at_unfinished(self) -> None:
        """Report unfinished lines, if somebody shows them."""
        now = time.monotonic()
        tell = self.on_unfinished
        if tell is None or not self._look_at or now < self._look_at:
            return
        self._look_at = 0.0
        for source in [source for sources in self._sources.values() for source in sources]:
            blocks = self._unfinished_of(source, now - _YOUNG_S)
            if blocks is None:
                self._look_at = now + _FIRST_S
            elif blocks:
                self._look_at = self._look_at or now + _UNFINISHED_S
            if blocks is not None and blocks != self._unfinished.get(source, []):
                self._unfinished[source] = blocks
                self._safely(lambda source=source, blocks=blocks: tell(source, blocks))

    def _unfinished_of(self, source: Source, began: float) -> list[Block] | None:
        """Return the unfinished lines of a source; None to ask again, see ``Folder.unfinished``."""
        unfinished: list[Block] = []
        for folder in self._folders.values():
            blocks = folder.unfinished(source, began)
            if blocks is None:
                return None
            unfinished += blocks
        return unfinished
