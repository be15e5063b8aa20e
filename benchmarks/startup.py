"""The start of a kernel: from its process to its first answers, and to eight ranks that have run a cell."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from harness import FLOOR, OURS, LaneError, Measure, Options, Target, calm
from notebook import Notebook, with_notebooks

RANKS = 8
ALLOWED = 0.3
"""Maximum seconds that our kernel may take beyond a plain one."""


def run(options: Options) -> list[Measure]:
    """Seconds since the process was started."""
    answer = Measure("startup", "kernel_info is answered", "s", "less")
    first = Measure("startup", "1+1 has run", "s", "less")
    answer.load = first.load = calm(options)
    with tempfile.TemporaryDirectory(prefix="monarch-bench-") as name:
        folder = Path(name)
        for turn in range(options.rounds(15) + 1):
            for system in (OURS, FLOOR) if turn % 2 else (FLOOR, OURS):
                seconds = _start(options, system, folder)
                if turn:
                    # The first one fills caches and creates IPython's folder.
                    for measure, value in zip((answer, first), seconds, strict=True):
                        measure.samples.setdefault(system, []).append(value)
        for measure in (answer, first):
            ours, floor = measure.samples[OURS], measure.samples[FLOOR]
            measure.target = Target(f"≤ floor + {ALLOWED} s", median(floor) + ALLOWED)
            more = median(a - b for a, b in zip(ours, floor, strict=True))
            measure.notes.append(f"{measure.name}: ours takes {more * 1e3:+.0f} ms, median of the differences")
        first.notes.append("floor: a plain ipykernel of the same environment")
        return [answer, first, _with_ranks(options, folder)]


def _start(options: Options, system: str, folder: Path) -> tuple[float, float]:
    """Start a kernel and end it; return when it has first answered, and when a cell has run."""
    book = Notebook(options, system, folder)
    try:
        info = book.send("kernel_info_request")
        book.wait(lambda: bool(info.reply))
        answered = book.age
        if book.ok("1+1").text.strip() != "2":
            raise LaneError(f"{system}: 1+1 gave something else")
        return answered, book.age
    finally:
        book.end()


def _with_ranks(options: Options, folder: Path) -> Measure:
    """By system, how long a person waits who opens a notebook and immediately runs the cells that start ranks."""
    measure = Measure("startup", f"{RANKS} ranks have run a cell", "s", "less", load=calm(options))
    for turn in range(options.rounds(5, 1)):
        for system in with_notebooks(options, FLOOR):
            if (turn and system not in measure.samples) or (turn > 2 and system != OURS):
                continue
            book = Notebook(options, system, folder)
            try:
                seconds = book.ask("start_ranks", count=RANKS)
            except LaneError as error:
                if system == OURS:
                    raise
                measure.notes.append(f"{system}: {error}")
            else:
                measure.samples.setdefault(system, []).extend(seconds)
            finally:
                book.end()
    return measure
