"""A small call to one actor, and its answer."""

from __future__ import annotations

from harness import FLOOR, Measure, Options, Target, calm, workers


def run(options: Options) -> list[Measure]:
    """Microseconds from the call to its result."""
    measure = Measure("roundtrip", "small call to 1 actor", "us", "less", target=Target("≤ 2x floor", 2.0, FLOOR))
    with workers(options, options.systems(), 1, measure.notes) as race:
        race.rounds(1, "one", count=100)
        measure.load = calm(options)
        seconds = race.all_figures(options.rounds(25, 8), "one", count=100)
    measure.take(seconds, 1e6)
    return [measure]
