"""Failures: the time until a death is known, until it is healed, until training continues; and what is left."""

from __future__ import annotations

from harness import FLOOR, OURS, Measure, Options, Target, calm, race

KINDS = {
    "pending": Target("≤ 0.2 s", 0.2),
    "healed": Target("≤ 0.5 s", 0.5),
    "training": Target("≤ 2 s", 2.0),
    "survivors": Target("none", 0.0),
}
"""Measures, and the targets for the worst round."""
_NAMES = {
    "pending": ("kill -9 of one of 4 ranks until the pending call fails", "s"),
    "healed": ("kill -9 of one of 8 ranks until all have answered a call again", "s"),
    "training": ("kill -9 in a DDP step until the next good step", "s"),
    "survivors": ("processes 2 s after kill -9 of the controller of 4 ranks", "processes"),
}
_NOTES = {
    "pending": ["floor: a pidfd of a process that is killed"],
    "healed": [
        "floor: a fork of a warm process, with raw pyzmq, that answers",
        "torchmonarch has no way to replace a rank: its time is that of the error, and of a new mesh",
        "ray restarts the actor by itself (max_restarts); its workers import torch again",
    ],
    "training": [
        "2 ranks, a small MLP, some seconds old; the new rank gets model and optimizer from the one that lives"
    ],
    "survivors": [],
}


def run(options: Options) -> list[Measure]:
    """Return each in its own processes for each round."""
    return [_measure(options, kind) for kind in KINDS]


def _measure(options: Options, kind: str) -> Measure:
    name, unit = _NAMES[kind]
    measure = Measure("failures", name, unit, "less", target=KINDS[kind], worst=True)
    wanted = {
        "pending": (OURS, FLOOR, "torchmonarch", "ray"),
        "healed": (OURS, FLOOR, "torchmonarch", "ray"),
        "training": (OURS,),
        "survivors": (OURS, "torchmonarch", "ray"),
    }[kind]
    systems = [name for name in options.systems() if name in wanted]
    with race(options, systems, measure.notes) as entered:
        entered.each("open", what="failures", kind=kind)
        measure.load = calm(options)
        measure.samples = entered.rounds(options.rounds(3), "run", count=1)
    measure.notes.extend(note for note in _NOTES[kind] if note.split()[0].rstrip(":") in (FLOOR, "2", *systems))
    return measure
