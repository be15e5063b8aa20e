"""Training: steps a second of a small MLP on two ranks, beside torchrun, which makes no calls."""

from __future__ import annotations

from typing import NamedTuple

from harness import FLOOR, OURS, LaneError, Measure, Options, Race, Samples, Target, calm, race

AHEAD = 4
"""Calls that are sent before the first result is awaited."""
STEPS = {"small": 200, "large": 20}
"""By model, the number of steps before the next system's turn."""


class Way(NamedTuple):
    """One way to make the steps."""

    name: str
    hand: bool = False
    """The program creates its process group itself, with ``init_process_group``."""
    ahead: int = 1
    loop: bool = False
    """One call makes all steps of a turn."""
    least: float = 0.0
    """Target, as a factor of torchrun's steps a second."""
    least_small: float = 0.0
    """Target of small steps, if higher: binding to cores speeds up only those."""


WAYS = (
    Way("a call each", least=0.95),
    Way(f"{AHEAD} calls ahead", ahead=AHEAD),
    Way("loop in the rank", loop=True, least=1.0, least_small=1.1),
    Way("own group, a call each", hand=True),
    Way("own group, loop in the rank", hand=True, loop=True, least=1.0),
)


def run(options: Options) -> list[Measure]:
    """Steps a second of identical steps in all systems, as their losses show."""
    return [measure for model in STEPS for measure in _train(options, model)]


def _train(options: Options, model: str) -> list[Measure]:
    notes: list[str] = []
    if "torchmonarch" in options.peers:
        notes.append("torchmonarch: it has no process groups of CPUs")
    # Systems with process groups; the others cannot run this.
    systems = [name for name in options.systems() if name in (OURS, FLOOR, "ray")]
    measures: list[Measure] = []
    with race(options, systems, notes) as entered:
        for hand in (False, True):
            measures += _ways(options, entered, model, [way for way in WAYS if way.hand is hand], notes)
    floor = measures[0].value(FLOOR)
    assert floor is not None
    notes.append(f"floor: torchrun with a plain script, {1e3 / floor:.1f} ms a {model} step")
    notes.append(f"{AHEAD} calls ahead: the result of the {AHEAD - 1}rd call before each is waited for")
    notes.append("ours: ranks are bound to their share of the cores, gloo's threads are not; torchrun binds nothing")
    return measures


def _ways(options: Options, entered: Race, model: str, ways: list[Way], notes: list[str]) -> list[Measure]:
    """Measure the modes that share a process group, in turn."""
    entered.each("open", what="training", model=model, hand=ways[0].hand)
    targets = [max(way.least, way.least_small if model == "small" else 0.0) for way in ways]
    measures = [
        Measure(
            "steps",
            f"{model} step, {way.name}",
            "/s",
            "more",
            target=Target(f"≥ {target:g}x floor", target, FLOOR) if target else None,
            notes=notes,
        )
        for way, target in zip(ways, targets, strict=True)
    ]
    count = STEPS[model]
    entered.each("run", count=count)
    load = calm(options)
    for measure in measures:
        measure.load = load
    for _ in range(options.rounds(15)):
        for way, measure in zip(ways, measures, strict=True):
            figures = entered.each("run", count=count, ahead=way.ahead, loop=way.loop)
            _check(figures)
            for system, (seconds, _) in figures.items():
                measure.samples.setdefault(system, []).append(count / seconds)
        entered.turn()
    return measures


def _check(figures: Samples) -> None:
    """All have made the same steps, so their losses are equal."""
    losses = {system: loss for system, (_, loss) in figures.items()}
    if any(abs(loss / losses[FLOOR] - 1) > 1e-3 for loss in losses.values()):
        raise LaneError(f"the losses differ: {losses}")
