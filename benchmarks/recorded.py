"""A recorded training step on two ranks, beside torchrun: steps a second, and the time of the program for each."""

from __future__ import annotations

from harness import FLOOR, OURS, LaneError, Measure, Options, Target, calm, race

COUNT = 200
MODEL = "small"


def run(options: Options) -> list[Measure]:
    """Steps a second of identical steps, as their losses show."""
    steps = Measure("recorded", f"{MODEL} step, recorded", "/s", "more", target=Target("≥ 0.95x floor", 0.95, FLOOR))
    issued = Measure("recorded", f"{MODEL} step, CPU of the program", "ms", "less", target=Target("≤ 0.3 ms", 0.3))
    with race(options, [OURS, FLOOR], steps.notes) as entered:
        entered.each("open", what="recorded", model=MODEL)
        # The first calls record.
        entered.each("run", count=COUNT)
        steps.load = issued.load = calm(options)
        for _ in range(options.rounds(15)):
            figures = entered.each("run", count=COUNT)
            if abs(figures[OURS][1] / figures[FLOOR][1] - 1) > 1e-3:
                raise LaneError(f"the losses differ: {figures}")
            for system, (seconds, *_) in figures.items():
                steps.samples.setdefault(system, []).append(COUNT / seconds)
            issued.samples.setdefault(OURS, []).append(figures[OURS][2] * 1e3)
            entered.turn()
    steps.notes.append("floor: torchrun with a plain script under DDP")
    issued.notes.append("forward, backward, all-reduce and SGD of two layers")
    return [steps, issued]
