"""A state dict of 256 MB from one actor to eight ranks, like weights from a trainer to generators."""

from __future__ import annotations

from harness import FLOOR, OURS, Measure, Options, Target, calm, race

RANKS = 8


def run(options: Options) -> list[Measure]:
    """Seconds until every rank has all of it in tensors of its own."""
    target = Target("≤ 2x floor", 2.0, FLOOR)
    measure = Measure("states", f"256 MB of 50 tensors to {RANKS} ranks", "s", "less", target=target)
    systems = [name for name in options.systems() if name in (OURS, FLOOR, "torchmonarch", "ray")]
    with race(options, systems, measure.notes) as entered:
        entered.each("open", what="states", ranks=RANKS)
        entered.each("run", count=1)
        measure.load = calm(options)
        measure.samples = entered.rounds(options.rounds(11), "run", count=1)
    measure.notes.append(f"floor: {RANKS} processes copy 256 MB each, at the same time")
    for system, how in (
        ("torchmonarch", "a buffer for each tensor, made once, by its TCP fallback"),
        ("ray", "the source puts the dict, as numpy arrays, and the ranks copy out of the object store"),
    ):
        if system in measure.samples:
            measure.notes.append(f"{system}: {how}")
    return [measure]
