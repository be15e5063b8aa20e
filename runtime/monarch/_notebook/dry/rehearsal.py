"""The process in which a cell is simulated."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._notebook.dry.packing import Packed, unpack


class SimulatedWorld(NamedTuple):
    """The devices of a simulation: see ``monarch.simulate``."""

    hosts: int
    gpus: int
    device: str


class Rehearsed(NamedTuple):
    """The outcome of a simulated cell.

    Attributes:
        forecast: its figures; None if it was not simulated.
        failure: why not, as a NotSimulated.
        output: what it has printed.
        lines: the lines of the program, by the numbers in the forecast.
    """

    forecast: Any
    failure: Any
    output: str
    lines: dict[int, Any]


def forecast_here(found: Rehearsed) -> Any:
    """Return the forecast with the numbers that its lines get in this process."""
    from monarch._engine.issuing.lines import lines

    numbers = {number: lines.take(line) if number else 0 for number, line in found.lines.items()}
    events = tuple(replace(each, line=numbers[each.line]) for each in found.forecast.events)
    return replace(found.forecast, events=events)


class Rehearsal(Actor):
    """Simulates one cell, in a process of its own: it changes torch there."""

    @endpoint
    def run(self, source: str, name: str, packed: Packed, world: SimulatedWorld) -> Rehearsed:
        """Simulate a cell as the first rank of a world.

        Args:
            source: code of the cell.
            name: the name of the cell.
            packed: the variables that it uses.
            world: the devices.
        """
        import torch
        import torch.distributed as dist

        from monarch._engine.simulation.forecast import Forecast
        from monarch._engine.simulation.program import ProgramSimulation, lines_of

        size = world.hosts * world.gpus
        simulation = ProgramSimulation(world.hosts, world.gpus, world.device, world.device != "cpu")
        kind = "cpu" if world.device == "cpu" else "cuda:0"
        own: dict[str, Any] = {
            "__name__": "__main__", "rank": 0, "world_size": size, "torch": torch, "dist": dist,
            "device": torch.device(kind), "display": print,
        }  # fmt: skip
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = simulation.run(source, name, lambda: unpack(packed, own))
        if isinstance(found, Forecast):
            return Rehearsed(found, None, printed.getvalue(), lines_of(found))
        return Rehearsed(None, found, printed.getvalue(), {})
