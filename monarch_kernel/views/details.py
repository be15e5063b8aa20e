"""Details of the ranks that views have pinned, once a second: stack, last output, tensors. The ranks run on."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import NamedTuple

from monarch._kernel_api import (
    Peek,
    PeekedTensor,
    ask_soon,
    current_node,
    is_tuple,
    peek_here,
    request,
    spawn_thread,
    state_of,
)
from monarch.exceptions import MonarchError
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.output.control_codes import without_codes
from monarch_kernel.output.log import LoggedLine, OutputLog
from monarch_kernel.views.outlet import Speaker
from monarch_kernel.views.protocol import Details, LogLine, TensorRow

EVERY_S = 1.0
"""Seconds between two looks."""
_PATIENCE = 0.5
"""Seconds for a rank to answer."""
_LINES = 20
_PACKAGES = re.compile(r"^/.*/(?:site-packages|dist-packages|lib/python3\.[0-9]+)/")


class Pinned(NamedTuple):
    """A rank that a view shows in detail."""

    mesh: Mesh
    rank: int
    norms: bool
    speaker: Speaker
    view: str = ""
    """Of those behind the same comm."""

    @property
    def key(self) -> tuple[str, str]:
        """Return its comm and its view, which pins one rank."""
        return self.speaker.comm, self.view


class Pins:
    """The pinned ranks of all views, and the thread that looks at them while there are any. Thread-safe.

    Args:
        log: returns the output of ranks.
        is_open: tells whether a view still shows a mesh.
    """

    def __init__(self, log: Callable[[], OutputLog], is_open: Callable[[str, Speaker], bool]) -> None:
        self._log = log
        self._is_open = is_open
        self._lock = threading.Lock()
        self._pins: dict[tuple[str, str], Pinned] = {}
        """By comm and view. Guarded by ``_lock``, as ``_running`` is."""
        self._running = False
        self._wake = threading.Event()
        self.on_pin: Callable[[str], object] = lambda proc: None
        """Called with the process of each rank that a person selects. It must not wait. Set once."""

    def pin(self, pinned: Pinned) -> None:
        """Send the details of a rank to a view from now on, and those of no other."""
        with self._lock:
            before = self._pins.get(pinned.key)
            self._pins[pinned.key] = pinned
            starts, self._running = not self._running, True
        self._wake.set()
        if before is None or (before.mesh, before.rank) != (pinned.mesh, pinned.rank):
            self.on_pin(state_of(pinned.mesh.procs).procs.proc(pinned.rank))
        if starts:
            spawn_thread("monarch-pins", self._run)

    def unpin(self, comm: str, view: str) -> None:
        """Send no details to a view."""
        with self._lock:
            self._pins.pop((comm, view), None)

    def unpin_all(self, comm: str) -> None:
        """Send no details to the views behind a comm."""
        with self._lock:
            for key in [each for each in self._pins if each[0] == comm]:
                del self._pins[key]

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                pins = list(self._pins.values())
                self._running = bool(pins)
            if not pins:
                return
            for pinned in pins:
                self._look(pinned)
            del pins
            self._wake.wait(EVERY_S)

    def _look(self, pinned: Pinned) -> None:
        if not self._is_open(state_of(pinned.mesh.procs).procs.uid, pinned.speaker):
            self.unpin(*pinned.key)
            return
        try:
            details = details_of(pinned.mesh, pinned.rank, pinned.norms, self._log())
        except (MonarchError, LookupError):
            # The mesh or the session has ended.
            self.unpin(*pinned.key)
            return
        pinned.speaker.tell(details)


def details_of(mesh: Mesh, rank: int, norms: bool, log: OutputLog) -> Details:
    """Look at a rank.

    Args:
        mesh: the mesh of the rank.
        rank: its number.
        norms: whether to compute the norms of large tensors too.
        log: the output of ranks.
    """
    procs = state_of(mesh.procs).procs
    lines, _ = log.newest(lambda line: line.mesh == procs.uid and rank in line.ranks, _LINES, False)
    shown = [log_line(line) for line in lines]
    proc = procs.proc(rank)
    if current_node().peers.get(proc).dead is not None:
        return Details(procs.uid, rank, [], shown, [], f"rank {rank} is dead; heal replaces it")
    answer = ask_soon([proc], request(peek_here, True, norms), _PATIENCE).get(proc)
    if not is_tuple(answer):
        note = f"rank {rank} did not answer within {_PATIENCE:g} s; it may be in C code that holds the GIL"
        return Details(procs.uid, rank, [], shown, [], note)
    peek = Peek(*answer)
    tensors = [_tensor_row(PeekedTensor(*each)) for each in peek.tensors]
    return Details(procs.uid, rank, short_stack(peek.stack), shown, tensors, _note(peek))


def short_stack(lines: list[str]) -> list[str]:
    """Return the lines of a stack without the folders of Python and of its packages, for narrow views."""
    return [_PACKAGES.sub("", line) for line in lines]


def log_line(line: LoggedLine) -> LogLine:
    """Return the row of a line of output."""
    return LogLine([*line.ranks], line.stream, without_codes(line.text), line.cell)


def _tensor_row(each: PeekedTensor) -> TensorRow:
    norm = each.norm if each.norm is not None and each.norm == each.norm and abs(each.norm) != float("inf") else None
    return TensorRow(each.name, each.shape, each.dtype, each.device, norm, each.nans)


def _note(peek: Peek) -> str:
    more = f"{peek.more} more tensors are not listed" if peek.more else ""
    without = f"norms of {peek.without} tensors that are large or on a GPU are computed only on request"
    return "; ".join(filter(None, [more, without if peek.without else ""]))
