"""Large arguments and results: 64 MB to 8 actors, and 256 MB to one actor and back."""

from __future__ import annotations

import os

from harness import FLOOR, OURS, Measure, Options, Race, Target, calm, workers

MB = 1 << 20
SHARED, SINGLE = 64 * MB, 256 * MB


def run(options: Options) -> list[Measure]:
    """Milliseconds or GB/s. Every receiver reads all bytes."""
    measures: list[Measure] = []
    kinds = ("torch",) if options.quick else ("torch", "numpy")
    for kind in kinds:
        measures += _shared(options, kind)
    for kind in kinds:
        measures += _single(options, kind)
    return measures


def _shared(options: Options, kind: str) -> list[Measure]:
    what = f"64 MB {kind} to 8 actors"
    first = Measure("payload", f"{what}, cold", "ms", "less", target=Target("≤ 1.5x floor", 1.5, FLOOR))
    warm = Measure("payload", f"{what}, warm", "ms", "less", target=Target("≤ 1x floor", 1.0, FLOOR))
    for turn in range(options.rounds(5, 1)):
        # Fresh workers each time; twice for the peers, which take seconds to start.
        systems = options.systems() if turn < 2 else [OURS, FLOOR]
        with workers(options, systems, 8, first.notes, torch=True) as race:
            race.each("share", kind=kind, size=MB // 4)
            first.load = warm.load = calm(options)
            _share(race, kind, first, 1)
            _share(race, kind, warm, options.rounds(4, 3))
    first.notes.append("floor: two copies of memory, and a read by each of 8 processes in turn, on all cores")
    first.notes.append("cold: the first of this size, after a small call of the same kind; warm: those after it")
    return [first, warm]


def _share(race: Race, kind: str, measure: Measure, rounds: int) -> None:
    for _ in range(rounds):
        seconds = race.each("memcpy", only=[FLOOR], size=SHARED, copies=2, reads=-(-8 // (os.cpu_count() or 1)))
        peers = [system for system in race.lanes if system != FLOOR]
        seconds.update(race.each("share", only=peers, kind=kind, size=SHARED))
        for system, values in seconds.items():
            measure.samples.setdefault(system, []).append(values[0] * 1e3)
        race.turn()


def _single(options: Options, kind: str) -> list[Measure]:
    target = Target("≥ 0.5x floor", 0.5, FLOOR)
    measures = {
        "give": Measure("payload", f"256 MB {kind} as argument", "GB/s", "more", target=target),
        "take": Measure("payload", f"256 MB {kind} as result", "GB/s", "more", target=target),
    }
    notes = measures["give"].notes
    with workers(options, options.systems(), 1, notes, torch=True) as race:
        for way, measure in measures.items():
            race.each("share", kind=kind, size=MB // 4)
            measure.load = calm(options)
            for turn in range(options.rounds(5, 2) + 1):
                seconds = race.each("memcpy", only=[FLOOR], size=SINGLE, copies=1, reads=1)
                peers = [system for system in race.lanes if system != FLOOR]
                seconds.update(race.each(way, only=peers, kind=kind, size=SINGLE))
                if turn:
                    # The first one warms up; its cost is in the figures of 64 MB.
                    for system, values in seconds.items():
                        measure.samples.setdefault(system, []).append(SINGLE / values[0] / 1e9)
                race.turn()
    notes.append("floor: one copy of memory, and one read of it")
    notes.append("ray, and ours as a result: the reader maps the memory of the writer, without a copy of its own")
    return list(measures.values())
