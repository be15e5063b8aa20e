"""Output of ranks as the program shows it: tagged with ranks, equal lines folded."""

from __future__ import annotations

import codecs
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from monarch._core.roster import split_proc
from monarch._core.text.cpp_frames import without_cpp_frames
from monarch._core.text.folding.blocks import Block, Line, merge_blocks
from monarch._core.text.folding.folder import Folder
from monarch._node.node import Node
from monarch._node.services.frame import send_to_all
from monarch._procs.agent.merging import outputs_of
from monarch._procs.os.posix import release_free_memory
from monarch._procs.rank.output import cost_of
from monarch._wire import messages as m

_WINDOW = 0.1
"""Seconds that a line waits for equal ones of other ranks, unless its call ends earlier."""
_GATHER_S = 0.03
"""Seconds that output waits for more to be shown together; the first after a pause does not wait."""
_CREDIT_STEP = 64 << 10
"""Cost of a rank's output after which it gets credit."""
_PORTION = 4 << 20
"""Cost of queued output after which due lines are shown first."""
_UNFINISHED_S = 0.2
"""Seconds between checks of unfinished lines, such as progress bars."""
_FIRST_S = 0.1
"""Seconds before the first check after a pause, and before the next one if a line has just begun."""
_YOUNG_S = 0.08
"""Seconds for which the end of a line is awaited: print writes it separately."""
_SHOWN_S = 0.8
"""The most seconds that a result waits for the output of its call to be shown."""
_MUCH = 64 << 20
"""Cost of output after which free memory is returned to the system."""
_HOLD_S = 2.0
"""The most seconds that output waits for a display that was made before it, whose thread may get no CPU."""
_FLUSH_S = 10.0
"""Seconds that ``flush`` waits for the output thread."""

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


class _Stop:
    """A mesh that is ending. For the output thread only."""

    def __init__(self, uid: str, procs: Sequence[str]) -> None:
        self.uid = uid
        self.left = set(procs)
        """Processes whose last output is not taken."""
        self.shown: threading.Event | None = None
        """To be set when all is shown; None while the future of the end is open."""


class OutputView:
    """Collects the output of all ranks of a session in a separate thread; receiving only queues it.

    ``on_line`` gets each folded line; its ``source`` is the uid of the process mesh, the key of the actor, and the port
    of the running call. By default lines go to this process's stdout and stderr. ``on_blocks`` gets the same lines in
    blocks that arrived together; by default it calls ``on_line``. Both are called without any lock.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        # Appended by any thread, taken only by the output thread.
        self._queue: deque[Callable[[], None]] = deque()
        # Set by any thread: the queue has items; and they must not wait for more.
        self._arrived = threading.Event()
        self._urgent = threading.Event()
        # Receiving thread only: ports of running calls that have printed.
        self._printing: set[int] = set()
        # Below: output thread only.
        self._folders: dict[float, Folder] = {_WINDOW: Folder(_WINDOW)}
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
        self._stops: dict[int, _Stop] = {}
        """Stopped meshes, by the port of the future of their end."""
        self.on_line: Callable[[Line], None] = show
        self.on_blocks: Callable[[list[Block]], None] = self._by_line
        self.on_unfinished: Callable[[Source, list[Block]], None] | None = None
        """Called with a source and its unfinished lines when they have changed, from time to time. Such lines are of
        another stream once they are finished, see ``fold.PROGRESS``."""
        self.on_left_out: Callable[[Source, int, int], None] = lambda source, rank, count: None
        """Called with the number of dropped bytes of a rank that was too far ahead."""
        self.on_end: Callable[[int], None] = lambda port: None
        """Called with the port of each call that has printed, once all its output was shown."""
        node.dispatch.handle(m.Output, lambda output, _: self.take(output))
        node.ports.closed.subscribe(self.done)
        node.waits.await_shown = self.await_shown
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="monarch-output", daemon=True)
        self._thread.start()

    # For any thread

    def configure(self, uid: str, shown: bool, window: float | None) -> None:
        """Set whether a mesh's output is shown, and how long to wait for equal lines."""
        self._put(lambda: self._configure(uid, shown, _WINDOW if window is None else window))

    def know(self, offsets: dict[tuple[str, str], int]) -> None:
        """Note how much of each stream an earlier program has shown."""
        self._put(lambda: self._seen.update(offsets))

    def take(self, output: m.Output) -> None:
        """Queue the output of a rank; in the receiving thread."""
        port, late = self._call_of(output.caller, output.port)
        self._put(lambda: self._take(output, port, late))

    def _call_of(self, caller: str, port: int) -> tuple[int, bool]:
        """Return the port of a call of this process that prints, or 0, and whether the call has ended."""
        if not port or caller != self._node.proc:
            return 0, False
        # First, for the case that it is closed meanwhile.
        self._printing.add(port)
        late = not self._node.ports.follow(port)
        if late:
            self._printing.discard(port)
        return port, late

    def take_merged(self, merged: m.MergedOutput) -> None:
        """Queue the equal output of some ranks; in the receiving thread."""
        port, late = self._call_of(merged.caller, merged.port)
        self._put(lambda: self._take_merged(merged, port, late))

    def done(self, port: int) -> None:
        """Show the output of a call that has ended."""
        if port in self._printing:
            self._printing.discard(port)
            shown = self._node.waits.unshown[port] = threading.Event()
            self._put(lambda: self._done(port, shown), urgent=True)

    def stops(self, uid: str, procs: Sequence[str], port: int) -> None:
        """Show the last output of a mesh before the result of its end is read.

        Args:
            uid: the uid of the mesh.
            procs: processes that are ending.
            port: the port of the future of their end.
        """
        self._put(partial(self._stops.__setitem__, port, _Stop(uid, procs)))
        self._printing.add(port)
        if not self._node.ports.follow(port):
            self._printing.discard(port)
            self._put(lambda: self._forget_stop(port))

    def await_shown(self) -> None:
        """Wait briefly until the output of ended calls is shown, before a result is read."""
        # Of all calls, since output of one actor may come with that of another in its process.
        deadline = time.monotonic() + _SHOWN_S
        for port, shown in list(self._node.waits.unshown.items()):
            if threading.current_thread() is self._thread:
                return
            if not shown.wait(max(0.0, deadline - time.monotonic())):
                # There is too much; it comes later, and no other result waits for it.
                self._node.waits.unshown.pop(port, None)

    def ended(self, dead: m.Dead) -> None:
        """Queue the last output of a dead proc, for the call that ran there, before that fails; receiving thread."""
        tails = dead.tails
        port = self._node.ports.oldest_call_of(dead.proc) if tails else 0
        if port:
            self._printing.add(port)
        self._put(lambda: self._ended(dead.proc, tails, port))

    def flush(self) -> None:
        """Show all pending output."""
        shown = threading.Event()
        self._put(lambda: self._flush(shown), urgent=True)
        if not self._thread.is_alive():
            self._work()
        elif threading.current_thread() is not self._thread:
            shown.wait(_FLUSH_S)

    def hold(self, proc: str, shown: threading.Event) -> None:
        """Let what a proc prints from now on wait until something else is shown, for a bounded time; for any thread.

        Args:
            proc: the printing process.
            shown: set, and followed by ``go_on``, once that is shown.
        """
        self._put(lambda: self._hold(proc, shown))

    def go_on(self) -> None:
        """Show output that waited for something that is shown now."""
        self._put(_nothing, urgent=True)

    def run(self, action: Callable[[], None]) -> None:
        """Call a function in the output thread, after what has arrived."""
        self._put(action, urgent=True)

    def catch_up(
        self, proc: str = "", ports: Callable[[int], bool] = lambda port: True, patience: float = _SHOWN_S
    ) -> None:
        """Show all finished lines that have arrived and need not wait; unfinished ones stay.

        Args:
            proc: a process whose unfinished lines end here.
            ports: tells for each of its calls, by port, whether its lines do.
            patience: the most seconds that this waits for the output thread.
        """
        shown = threading.Event()
        self._put(lambda: self._catch_up(shown, proc, ports), urgent=True)
        if threading.current_thread() is not self._thread:
            shown.wait(patience)

    def close(self) -> None:
        """Show all pending output and end the thread."""
        self.flush()
        self._closing = True
        self._put(_nothing, urgent=True)
        if threading.current_thread() is not self._thread:
            self._thread.join(_FLUSH_S)

    def _put(self, action: Callable[[], None], urgent: bool = False) -> None:
        self._queue.append(action)
        if urgent:
            self._urgent.set()
        if not self._arrived.is_set():
            self._arrived.set()

    # The thread

    def _run(self) -> None:
        last = 0.0
        while not self._closing:
            self._arrived.wait(self._idle_time())
            left = last + _GATHER_S - time.monotonic()
            if left > 0 and self._arrived.is_set():
                self._urgent.wait(left)
            self._arrived.clear()
            self._urgent.clear()
            self._work()
            last = time.monotonic()

    def _idle_time(self) -> float | None:
        """Return the seconds until something is due."""
        due = [when for folder in self._folders.values() if (when := folder.next_due()) is not None]
        if self._look_at:
            due.append(self._look_at)
        due += [gate.deadline for gate in self._gates.values()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _work(self) -> None:
        while True:
            try:
                action = self._queue.popleft()
            except IndexError:
                break
            self._safely(action)
            if self._taken >= _PORTION:
                self._show_due()
        self._open_gates()
        self._show_due()
        self._look_at_unfinished()

    def _show_due(self) -> None:
        now = time.monotonic()
        for folder in self._folders.values():
            self._due += folder.due_blocks(now)
        self._emit()
        self._give_credit()
        self._since += self._taken
        self._taken = 0
        if self._since > _MUCH and not self._queue:
            self._since = 0
            release_free_memory()

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
        folder = self._folders[self._windows.get(source[0], _WINDOW)]
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


def in_units(count: int) -> str:
    """Return a byte count with a unit, in brackets; empty for small counts."""
    for size, unit in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
        if count >= size:
            return f" ({count / size:.1f} {unit})"
    return ""


def show(line: Line) -> None:
    """Write a line to stdout or stderr of this process."""
    show_blocks([Block(line.source, line.ranks, line.stream, line.text + "\n")])


def show_blocks(blocks: Sequence[Block]) -> None:
    """Write lines to stdout or stderr of this process."""
    for block in blocks:
        file = sys.stderr if block.stream == "stderr" else sys.stdout
        if file is not None:
            try:
                file.write(block.prefixed())
                file.flush()
            except (OSError, ValueError):
                # The program has closed the stream.
                pass


def _nothing() -> None:
    pass
