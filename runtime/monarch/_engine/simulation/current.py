"""The simulation of this process, for the files that make meshes."""

from __future__ import annotations

from typing import Any, Protocol


class Simulating(Protocol):
    """A simulation, as the engine sees it."""

    def procs(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
        """Return simulated processes, in place of those of a host."""
        ...


class CurrentSimulation:
    """The simulation whose block runs; one for each process. Set by the thread of the program."""

    simulation: Simulating | None = None


current = CurrentSimulation()
