"""Training: steps a second of a small MLP on two ranks, beside torchrun, which has nobody who calls."""

from __future__ import annotations

from harness import FLOOR, OURS, LaneError, Measure, Options, Samples, Target, calm, race

AHEAD = 4
"""Calls that are sent before the result of the first is waited for."""
STEPS = {"small": 200, "large": 20}
"""Of each model, as many as are made before the next system's turn."""


def run(options: Options) -> list[Measure]:
    """Steps a second, with a call for each; the same steps in all, which their losses show."""
    measures: list[Measure] = []
    for model in STEPS:
        measures += _train(options, model)
    return measures


def _train(options: Options, model: str) -> list[Measure]:
    target = Target("≥ 0.97x floor", 0.97, FLOOR)
    called = Measure("steps", f"{model} step", "/s", "more", target=target)
    ahead = Measure("steps", f"{model} step, {AHEAD} ahead", "/s", "more")
    notes, count = called.notes, STEPS[model]
    if "torchmonarch" in options.peers:
        notes.append("torchmonarch: it has no process groups of CPUs")
    # Systems with process groups; of the others nothing is to be seen here.
    systems = [name for name in options.systems() if name in (OURS, FLOOR, "ray")]
    with race(options, systems, notes) as entered:
        entered.each("open", what="training", model=model)
        entered.each("run", count=count)
        called.load = ahead.load = calm(options)
        for _ in range(options.rounds(15)):
            for measure, calls in ((called, 1), (ahead, AHEAD)):
                figures = entered.each("run", count=count, ahead=calls)
                _check(figures)
                for system, (seconds, _) in figures.items():
                    measure.samples.setdefault(system, []).append(count / seconds)
            entered.turn()
    floor = called.value(FLOOR)
    assert floor is not None
    notes.append(f"floor: torchrun with a plain script, {1e3 / floor:.1f} ms a {model} step")
    notes.append(f"the result of each step is waited for; or, {AHEAD} ahead, that of the {AHEAD - 1}rd before it")
    return [called, ahead]


def _check(figures: Samples) -> None:
    """All have made the same steps, so that their losses are the same."""
    losses = {system: loss for system, (_, loss) in figures.items()}
    if any(abs(loss / losses[FLOOR] - 1) > 1e-3 for loss in losses.values()):
        raise LaneError(f"the losses differ: {losses}")
