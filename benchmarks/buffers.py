"""One-sided reads: a process copies memory of another one, whose Python takes no part in it."""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median

from harness import FLOOR, OURS, Measure, Options, Race, Target, calm, race

MB = 1 << 20
LARGE, SMALL = 256 * MB, 4096
DIRECT = "nixl"
"""The system that calls NIXL directly."""


def run(options: Options) -> list[Measure]:
    """GB/s of a large read, microseconds of a small one; also by transports that would not be chosen here."""
    large = Measure("buffers", "read 256 MB", "GB/s", "more", target=Target("≥ 0.85x floor", 0.85, FLOOR))
    small = Measure("buffers", "read 4 KB", "us", "less")
    stream = Measure("buffers", "read 256 MB by stream", "GB/s", "more")
    measures = [large, small, stream]
    notes = large.notes
    systems = [name for name in options.systems() if name in (OURS, FLOOR, "torchmonarch")]
    with race(options, systems, notes) as entered:
        _measure(options, entered, small, SMALL)
        _measure(options, entered, large, LARGE)
        _measure(options, entered, stream, LARGE, "stream")
    notes.append("floor: one copy of memory within a process, by one thread; of 4 KB it stays in a cache")
    notes.append(
        "ours: up to four threads copy, and large tensors of ranks are in huge pages; no other system has these"
    )
    if "torchmonarch" in systems:
        notes.append("torchmonarch reads by its TCP fallback")
    if find_spec(DIRECT) is None:
        notes.append("nixl is not installed")
        return measures
    with race(options, [OURS, DIRECT], notes) as entered:
        for size, name, unit in ((LARGE, "256 MB", "GB/s"), (SMALL, "4 KB", "us")):
            measure = Measure("buffers", f"read {name} by nixl", unit, "more" if size == LARGE else "less")
            if size == LARGE:
                measure.target = Target("≥ 0.9x nixl", 0.9, DIRECT)
            _measure_alone(options, entered, measure, size)
            measures.append(measure)
    notes.append(
        "nixl: called directly by two plain processes; what is read into is registered for each read, as in ours"
    )
    return measures


def _measure(options: Options, entered: Race, measure: Measure, size: int, transport: str = "") -> None:
    for turn in range(options.rounds(3, 1)):
        # Other memory each time, since some of it is faster to copy; not for torchmonarch, which takes seconds to
        # start.
        for system in list(entered.lanes):
            if not turn or system != "torchmonarch":
                way = transport if system == OURS else ""
                entered.each("open", only=[system], what="reads", size=size, transport=way)
        entered.each("run", count=_count(size))
        measure.load = max(measure.load, calm(options))
        for system, values in entered.rounds(options.rounds(5), "run", count=_count(size)).items():
            measure.samples.setdefault(system, []).extend(_scaled(size, value) for value in values)


def _measure_alone(options: Options, entered: Race, measure: Measure, size: int) -> None:
    """One system at a time has processes, since each process that has used NIXL has a busy thread."""
    measure.load = calm(options)
    for _ in range(options.rounds(7, 2)):
        for system in list(entered.lanes):
            entered.each("open", only=[system], what="reads", size=size, transport=DIRECT)
            entered.each("run", only=[system], count=_count(size))
            for values in entered.each("run", only=[system], count=3 * _count(size)).values():
                measure.samples.setdefault(system, []).append(_scaled(size, median(values)))
            entered.each("shut", only=[system])
        entered.turn()


def _count(size: int) -> int:
    return 3 if size == LARGE else 200


def _scaled(size: int, seconds: float) -> float:
    return size / seconds / 1e9 if size == LARGE else seconds * 1e6
