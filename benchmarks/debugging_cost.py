"""The cost of debugging that is available but unused, and of breakpoints that are not reached.

A loop of Python calls and small tensor operations, as in a training step, runs on one rank: without a breakpoint before
and after one was set and cleared, and with one in another function and in the loop itself.

    python benchmarks/debugging_cost.py
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from monarch._kernel_api import ask_ranks, break_here, request, state_of
from monarch.actor import Actor, endpoint, this_host

ROUNDS = 25
STEPS = 200_000


def unit(x: int) -> int:
    """A function that does little."""
    return x + 1


def elsewhere() -> None:
    """A function that is never called."""


class Loop(Actor):
    """Runs the loop."""

    @endpoint
    def run(self, steps: int) -> float:
        """Return the seconds of a loop of calls."""
        begun, x = time.perf_counter(), 0
        for _ in range(steps):
            x = unit(x)
        return time.perf_counter() - begun

    @endpoint
    def trace(self) -> bool:
        """Return whether a trace function is installed."""
        return sys.gettrace() is not None


def main() -> None:
    """Print a table."""
    mesh = this_host().spawn_procs({"gpus": 1})
    loop = mesh.spawn("loop", Loop)
    procs = state_of(mesh).procs

    def set_points(*points: tuple[int, str, str, int, str, str, str]) -> None:
        ask_ranks(procs, [0], request(break_here, list(points)))

    def seconds(name: str) -> float:
        found: list[Any] = [loop.run.call_one(STEPS).get() for _ in range(ROUNDS)]
        traced = loop.trace.call_one().get()
        best = min(found)
        print(f"{name:44} {best / STEPS * 1e9:7.1f} ns per call (median {statistics.median(found) / STEPS * 1e9:.1f})"
              f", trace function: {traced}")  # fmt: skip
        return best

    line = unit.__code__.co_firstlineno + 2
    seconds("warm-up")
    before = seconds("never a breakpoint")
    set_points((1, "function", "elsewhere", 0, "", "", ""))
    elsewhere_s = seconds("a breakpoint elsewhere")
    set_points((1, "line", __file__, line, "x == -1", "", ""))
    inside = seconds("a breakpoint in the called function, not met")
    set_points()
    after = seconds("breakpoints cleared")
    print(f"after to before: {after / before:.3f}; elsewhere: {(elsewhere_s - before) / STEPS * 1e9:.0f} ns per call; "
          f"in the function: {(inside - before) / STEPS * 1e9:.0f} ns per call")  # fmt: skip


if __name__ == "__main__":
    main()
