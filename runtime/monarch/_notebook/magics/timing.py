"""``%time`` and ``%timeit`` on a rank."""

from __future__ import annotations

import math
import time
import timeit
from dataclasses import dataclass
from typing import Any

from monarch._notebook.magics.nested import names_of, run_nested, this_cell
from monarch._notebook.magics.words import options_of

_LONG = 0.2
"""Seconds that one run of a timed loop should at least take."""


def time_code(code: str, above: int) -> Any:
    """Run code of the cell and print how long it took; return its value."""
    wall, used = time.perf_counter(), time.process_time()
    try:
        return run_nested(code, above)
    finally:
        used, wall = time.process_time() - used, time.perf_counter() - wall
        print(f"CPU time: {duration(used)}, wall time: {duration(wall)}")


@dataclass
class Timing:
    """The result of ``%timeit -o``: seconds per loop."""

    loops: int
    all_runs: list[float]

    @property
    def average(self) -> float:
        """Mean of the runs."""
        return math.fsum(self.all_runs) / len(self.all_runs)

    @property
    def stdev(self) -> float:
        """Standard deviation of the runs."""
        return math.sqrt(math.fsum((each - self.average) ** 2 for each in self.all_runs) / len(self.all_runs))

    @property
    def best(self) -> float:
        """The fastest run."""
        return min(self.all_runs)

    def __str__(self) -> str:
        runs, loops = len(self.all_runs), self.loops
        return (
            f"{duration(self.average)} ± {duration(self.stdev)} per loop (mean ± std. dev. of {runs} "
            f"run{'s' if runs != 1 else ''}, {loops:,} loop{'s' if loops != 1 else ''} each)"
        )


def time_loops(line: str, body: str = "") -> Timing | None:
    """Time a statement, or the body of a cell with the line as its setup; print and perhaps return the result."""
    options, rest = options_of(line, "n:r:oqtcp:")
    statement, setup = (body, rest or "pass") if body else (rest, "pass")
    timer = timeit.Timer(statement, setup, globals=names_of(this_cell()))
    count = int(options.get("n", 0)) or _count(timer)
    timing = Timing(count, [each / count for each in timer.repeat(int(options.get("r", 7)), count)])
    if "q" not in options:
        print(timing)
    return timing if "o" in options else None


def _count(timer: timeit.Timer) -> int:
    """Return how many loops take long enough."""
    count = 1
    while timer.timeit(count) < _LONG:
        count *= 10
    return count


def duration(seconds: float) -> str:
    """Return a duration with three digits in a fitting unit."""
    if seconds >= 60:
        return f"{int(seconds // 60)}min {seconds % 60:.0f}s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
