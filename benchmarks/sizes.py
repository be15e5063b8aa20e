"""Arguments and results of growing size, and small values of several kinds, to one actor while eight are alive."""

from __future__ import annotations

from harness import FLOOR, OURS, Measure, Options, Race, Target, calm, workers

KB = 1 << 10
SIZES = (
    0,
    KB,
    32 * KB,
    64 * KB,
    100 * KB,
    118 * KB,
    120 * KB,
    128 * KB,
    192 * KB,
    256 * KB,
    KB * KB,
    16 * KB * KB,
    64 * KB * KB,
)
WAYS = {"put": "argument", "get": "result"}


def run(options: Options) -> list[Measure]:
    """Microseconds of a call: how the value travels, and ours beside raw ZeroMQ with one pickle at each end."""
    measures: list[Measure] = []
    systems = [OURS, FLOOR]
    notes: list[str] = []
    with workers(options, systems, 8, notes, torch=True) as race:
        # Else the scheduler has both ends on one core now and then, and a call takes half or twice the time.
        race.each("spread")
        race.rounds(1, "small", kind="int", size=0, count=50)
        load = calm(options)
        for kind in ("int", "numpy", "torch"):
            measures.append(_measure(f"echo of a small {kind}", load))
            _generations(race, measures[-1], options, "small", 40, kind=kind, size=16)
        for way, what in WAYS.items():
            measures += _sizes(race, options, way, what, load)
    with workers(options, systems, 8, notes, torch=True) as race:
        measures += _sizes(race, options, "put_all", "argument to all 8", calm(options))
    measures[0].notes += [
        *notes,
        "floor: ROUTER and DEALER, pickle protocol 5, no shared memory",
        "but for the rows of all 8: the program has a core of its own",
    ]
    return measures


def _sizes(race: Race, options: Options, way: str, what: str, load: float) -> list[Measure]:
    measures: list[Measure] = []
    for kind in ("bytes", "numpy"):
        for size in SIZES[::3] if options.quick else SIZES:
            measures.append(_measure(f"{size // KB:,} KB {kind} as {what}", load))
            count = max(2, min(30, (4 << 20) // max(1, size)))
            _generations(race, measures[-1], options, way, count, kind=kind, size=size)
    return measures


def _measure(name: str, load: float) -> Measure:
    return Measure("sizes", name, "us", "less", target=Target("≤ 1.5x floor", 1.5, FLOOR), load=load)


def _generations(race: Race, measure: Measure, options: Options, what: str, count: int, **with_: object) -> None:
    measure.take(race.all_figures(options.rounds(9, 3), what, count=count, **with_), 1e6)
