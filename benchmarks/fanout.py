"""A small call to all of many actors, with all answers gathered."""

from __future__ import annotations

from harness import FLOOR, Measure, Options, Target, calm, workers


def run(options: Options) -> list[Measure]:
    """Microseconds from the call to the last answer."""
    counts = (8, 32) if options.quick else (2, 8, 32, 64, 128, 256)
    return [_fan_out(options, count) for count in counts]


def _fan_out(options: Options, count: int) -> Measure:
    target = Target("≤ 2x floor", 2.0, FLOOR)
    measure = Measure("fanout", f"call {count} actors and gather", "us", "less", target=target)
    calls = max(10, 240 // count)
    # Hundreds of processes of several peers at once are too many for one machine.
    without = [peer for peer in options.peers if count > 128 or (count > 32 and peer != "torchmonarch")]
    with workers(options, options.systems(*without), count, measure.notes) as race:
        race.rounds(1, "all", count=calls)
        measure.load = calm(options)
        seconds = race.all_figures(options.rounds(25, 8), "all", count=calls)
    measure.take(seconds, 1e6)
    return measure
