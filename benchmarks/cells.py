"""A cell on eight ranks, through real kernels: from the request to the end, with all that it shows."""

from __future__ import annotations

from harness import FLOOR, OURS, Measure, Options, Target, calm
from notebook import notebooks, with_notebooks

RANKS = 8
_NUMBERS = [str(rank + 4000) for rank in range(RANKS)]
ROWS = {
    "empty cell": ("pass", "pass", []),
    "equal lines": (
        "print('epoch 4000')",
        f"for rank in range({RANKS}): print('epoch 4000')",
        ["epoch 4000"],
    ),
    "unequal lines": (
        "print('loss of', rank + 4000)",
        f"for rank in range({RANKS}): print('loss of', rank + 4000)",
        _NUMBERS,
    ),
    "unequal values": (
        "rank + 4000",
        f"[rank + 4000 for rank in range({RANKS})]",
        _NUMBERS,
    ),
}
"""For each cell: its code on ranks, in a notebook without ranks, and the expected output."""
LINES = {
    f"{count:,} {kind} lines": (
        f"for i in range({count}): print('line', i, 'of', {last})",
        f"for i in range({count}): print('line', i, 'of', 4000)",
        [f"line {count - 1} of"],
    )
    for count in (1_000, 10_000)
    for kind, last in (("equal", "4000"), ("unequal", "rank + 4000"))
}
"""Cells with much output: each rank prints as many lines as the notebook without ranks."""


def run(options: Options) -> list[Measure]:
    """Milliseconds until the reply, the idle status and all output have arrived."""
    measures = [Measure("cells", f"{RANKS} ranks: {name}", "ms", "less") for name in (*ROWS, *LINES)]
    notes = measures[0].notes
    with notebooks(options, with_notebooks(options), notes) as race:
        race.each("start_ranks", count=RANKS)
        for measure, (body, plain, shown) in zip(measures, [*ROWS.values(), *LINES.values()], strict=True):
            how = {"body": body, "plain": plain, "shown": shown}
            race.rounds(2, "cells", count=5, **how)
            measure.load = calm(options)
            measure.take(race.all_figures(options.rounds(20, 5), "cells", count=5, **how), 1e3)
    empty = measures[0]
    peers = [system for system in empty.samples if system not in (OURS, FLOOR)]
    best = min(peers, key=lambda peer: empty.value(peer) or 0.0, default="the better peer")
    empty.target = Target(f"≤ 1/3 of {best}", 1 / 3, best)
    for measure in measures[len(ROWS) :]:
        measure.target = Target("≤ 2x a notebook without ranks", 2.0, FLOOR)
    notes.append("floor: a cell that does as much in a notebook without ranks")
    return measures
