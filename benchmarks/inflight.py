"""Calls that are sent before the first answer is awaited: how many a second."""

from __future__ import annotations

from harness import Measure, Options, Samples, Target, calm, workers


def run(options: Options) -> list[Measure]:
    """Calls a second."""
    target = Target("≥ 3x torchmonarch", 3.0, "torchmonarch")
    fan = Measure("inflight", "fan-outs to 8 actors in flight", "/s", "more", target=target)
    one = Measure("inflight", "small calls in flight to 1 actor", "/s", "more", target=target)
    with workers(options, options.systems(), 8, fan.notes) as race:
        race.rounds(1, "flight_all", count=50)
        fan.load = calm(options)
        fan.samples = _rates(race.rounds(options.rounds(9), "flight_all", count=300))
        race.rounds(1, "flight_one", count=200)
        one.load = calm(options)
        one.samples = _rates(race.rounds(options.rounds(9), "flight_one", count=2000))
    return [fan, one]


def _rates(seconds: Samples) -> Samples:
    return {system: [1 / value for value in values] for system, values in seconds.items()}
