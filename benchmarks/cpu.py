"""CPU time of occasional calls, as a training loop or a notebook makes them."""

from __future__ import annotations

from harness import FLOOR, Measure, Options, Target, calm, workers


def run(options: Options) -> list[Measure]:
    """Microseconds of CPU time for a call of one rank, in controller and ranks together."""
    wanted = [(8, (0.01, 0.1, 0.4)), (64, (0.1,))]
    return [measure for count, periods in wanted for measure in _calls(options, count, periods)]


def _calls(options: Options, count: int, periods: tuple[float, ...]) -> list[Measure]:
    measures: list[Measure] = []
    for period in periods:
        name = f"call {count} actors each {period * 1e3:g} ms"
        target = Target("≤ 2x floor", 2.0, FLOOR)
        measure = Measure("cpu", f"{name}: CPU of a call and rank", "us", "less", target=target)
        # The controllers sleep between their calls, so only one system at a time makes calls.
        with workers(options, options.systems(*options.peers), count, measure.notes) as race:
            calls = max(5, round((1.0 if options.quick else 2.0) / period))
            race.rounds(1, "cpu", count=min(calls, 20), period=period)
            measure.load = calm(options)
            seconds = race.rounds(options.rounds(7, 3), "cpu", count=calls, period=period)
        measure.samples = {system: [value * 1e6 / count for value in values] for system, values in seconds.items()}
        measures.append(measure)
    return measures
