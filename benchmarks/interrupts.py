"""Stop, during any activity of ranks: the time until the notebook is back, the rung needed, and what was kept."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness import FLOOR, OURS, LaneError, Measure, Options, Target, calm
from kernel_client import Cell
from notebook import Notebook, said, with_notebooks

RANKS = 4
BOUND = 10.0
"""Seconds that a notebook has to come back, and then to run another cell."""
_NEVER = f"not back in {BOUND:g} s"


@dataclass(frozen=True)
class Busy:
    """An activity of ranks during a stop."""

    body: str
    alone: bool = False
    """Whether one rank does it, while the others run Python code."""
    endless: bool = False
    """Whether it continues after a stop, so that the next cell waits and is stopped too."""
    second: bool = False
    """Whether that second stop is the one to measure."""

    @property
    def cell(self) -> str:
        """The cell, which says when it begins."""
        body = f"if rank == 1:\n    {self.body}\nwhile True: pass" if self.alone else self.body
        # Its output must get out before it may hold the GIL.
        return f"print('busy on', rank, flush=True)\nimport time; time.sleep(0.5)\n{body}"


_IN_C = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"
# With only the loop in the try, some versions of Python raise an interrupt on the line before.
_SWALLOWED = "while True:\n    try:\n        steps = 0\n        while True: steps += 1\n    except BaseException: pass"
BUSY = {
    "Python loop": Busy("while True: pass"),
    "sleep": Busy("import time; time.sleep(600)"),
    "collective": Busy("if rank: dist.barrier()\nwhile True: pass"),
    "C, a second each": Busy("while True: hashlib.pbkdf2_hmac('sha256', b'', b'', steps)"),
    "C without end": Busy(_IN_C, alone=True, endless=True),
    "C, second stop": Busy(_IN_C, alone=True, endless=True, second=True),
    "C, lock kept": Busy("sum(range(10**12))", alone=True, endless=True),
    "SIGINT ignored": Busy("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"),
    "interrupt swallowed": Busy(_SWALLOWED),
}
_PREPARE = """
import hashlib, os, time
kept = os.getpid()
begun = time.perf_counter()
hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
steps = int(100_000 / (time.perf_counter() - begun))
"""
_CHECK = "import os; print('kept by' if globals().get('kept') == os.getpid() else 'new process', os.getpid())"
_RUNGS = {
    "interrupted": "interrupt",
    "stopped in a collective": "abort",
    "inside a C call": "left to finish",
    "replaced by": "replaced",
}
"""Short names for the notebook's messages about rungs."""


@dataclass
class Stop:
    """One stop."""

    seconds: float
    needed: list[str]
    kept: int = 0
    after: str = ""
    """Outcome of the next cell."""


def run(options: Options) -> list[Measure]:
    """Seconds from the interrupt to the reply and the idle status, each time."""
    measures: list[Measure] = []
    systems = with_notebooks(options, FLOOR)
    with tempfile.TemporaryDirectory(prefix="monarch-bench-") as name:
        for kind, busy in list(BUSY.items())[: 4 if options.quick else None]:
            measure = Measure("interrupts", kind, "s", "less", target=Target("≤ 2 s, each time", 2.0), worst=True)
            measure.load = calm(options)
            for system in [OURS] if busy.second else list(systems):
                stops = _stops(options, system, busy, Path(name), measure)
                measure.samples[system] = [stop.seconds for stop in stops]
                measure.words[system] = _words(stops)
                if system != OURS and any(_NEVER in stop.needed for stop in stops):
                    measure.notes.append(f"{system}: no more tries after one from which its notebook is not back")
                    systems.remove(system)
            measures.append(measure)
    measures[0].notes.append(f"{RANKS} ranks; a peer gets one try of each, and {BOUND:g} s for a cell to end")
    return measures


def _stops(options: Options, system: str, busy: Busy, folder: Path, measure: Measure) -> list[Stop]:
    """Stop a cell several times, in one notebook."""
    stops: list[Stop] = []
    book = Notebook(options, system, folder)
    try:
        book.start_ranks(RANKS)
        book.form_group(RANKS)
        for _ in range(options.rounds(5, 1) if system == OURS else 1):
            stops.append(_stop(book, busy))
    except LaneError as error:
        if system == OURS:
            raise
        measure.notes.append(f"{measure.name}: {system}: {error}")
    finally:
        book.end(politely=system == OURS)
    return stops


def _stop(book: Notebook, busy: Busy) -> Stop:
    book.on_ranks(_PREPARE)
    cell = book.execute(book.code(busy.cell))
    if not book.wait(lambda: said(cell.text, "busy on") >= set(range(RANKS))):
        raise LaneError(f"not busy on all ranks: {cell.text[-300:]!r}")
    # Until each has reached its activity.
    time.sleep(1)
    stop = _interrupted(book, cell)
    after = book.execute(book.code(_CHECK))
    if busy.endless and book.wait(lambda: after.ended or "waiting for" in after.text, BOUND) and not after.ended:
        again = _interrupted(book, after)
        if busy.second:
            stop = again
        else:
            stop.after = "waits"
        after = book.execute(book.code(_CHECK))
    if book.wait(lambda: after.ended, BOUND) and not _whole(after):
        # Some lose the first cell's output after a stop; the cell may have run all the same.
        after = book.execute(book.code(_CHECK))
        book.wait(lambda: _whole(after), BOUND)
    stop.kept = len(said(after.text, "kept by"))
    stop.after = stop.after or ("runs" if _whole(after) else "")
    return stop


def _whole(after: Cell) -> bool:
    """Return whether each rank has reported that it kept its variables."""
    return after.ended and len(said(after.text, "kept by") | said(after.text, "new process")) == RANKS


def _interrupted(book: Notebook, cell: Cell) -> Stop:
    """Press the stop button, and wait for the end of the cell."""
    begun = time.perf_counter()
    book.interrupt()
    if not book.wait(lambda: cell.ended, BOUND):
        return Stop(BOUND, [_NEVER])
    seconds = time.perf_counter() - begun
    line = next((line for line in cell.text.splitlines() if line.startswith("stopped")), "")
    rungs = [short for phrase, short in _RUNGS.items() if phrase in line]
    return Stop(seconds, rungs or [line or "-"])


def _words(stops: list[Stop]) -> dict[str, str]:
    """Results that are not seconds."""
    if not stops:
        return {}
    times = Counter(rung for stop in stops for rung in stop.needed)
    rungs = [rung if count == len(stops) else f"{rung} ({count} of {len(stops)})" for rung, count in times.items()]
    least, most = min(stop.kept for stop in stops), max(stop.kept for stop in stops)
    return {
        "needed": ", ".join(rungs),
        "kept": f"{least if least == most else f'{least} to {most}'} of {RANKS}",
        "next cell": ", ".join(dict.fromkeys(stop.after or "does not run" for stop in stops)),
    }
