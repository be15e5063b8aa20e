"""Eight torch-ready ranks: from a running controller, and from nothing."""

from __future__ import annotations

import sys

from harness import FLOOR, OURS, LaneError, Measure, Options, Process, Target, calm, cold_start, race

RANKS = 8


def run(options: Options) -> list[Measure]:
    """Seconds until each rank has answered a call that used torch."""
    return [_running(options), _cold(options)]


def _running(options: Options) -> Measure:
    measure = Measure("spawn", f"{RANKS} torch-ready ranks, warm", "s", "less", target=Target("< 0.25 s", 0.25))
    measure.notes.append("floor: forks of a process that has imported torch")
    measure.notes.append("warm: after a first mesh of the same program; peers keep nothing warm between meshes")
    with race(options, options.systems(), measure.notes) as entered:
        # Zygotes, where a system has them, are warm then.
        entered.each("spawn", only=[OURS, FLOOR], count=1, torch=True)
        entered.each("close", only=[OURS, FLOOR])
        measure.load = calm(options)
        for turn in range(options.rounds(9)):
            systems = [name for name in entered.lanes if turn < 3 or name in (OURS, FLOOR)]
            for system in systems:
                for values in entered.each("spawn", only=[system], count=RANKS, torch=True).values():
                    measure.samples.setdefault(system, []).append(values[0])
                if system in entered.lanes:
                    entered.each("close", only=[system])
            entered.turn()
    return measure


def _cold(options: Options) -> Measure:
    measure = Measure("spawn", f"{RANKS} torch-ready ranks, cold", "s", "less")
    measure.notes.append("floor: one import of torch by a fresh process")
    measure.notes.append("cold: the first mesh of a fresh controller, from the start of its process")
    measure.load = calm(options)
    floor = Process(FLOOR, sys.executable)
    try:
        for turn in range(options.rounds(7, 1)):
            measure.samples.setdefault(FLOOR, []).append(floor.ask("import_torch")[0])
            for system in options.systems(FLOOR):
                if system == OURS or turn < 3:
                    try:
                        seconds = cold_start(system, options.peers.get(system, sys.executable), RANKS)
                    except LaneError as error:
                        if system == OURS:
                            raise
                        measure.notes.append(f"{system}: {error}")
                    else:
                        measure.samples.setdefault(system, []).append(seconds)
    finally:
        floor.end()
    torch = measure.value(FLOOR)
    assert torch is not None
    measure.target = Target("≤ floor + 0.3 s", torch + 0.3)
    return measure
