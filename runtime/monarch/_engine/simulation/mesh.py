"""A mesh without processes: the ops of its first rank run at once on shards that have a shape only."""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from monarch._core.shapes.extent import Extent, axes_text
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import mesh_without_groups, shard_sizes
from monarch._engine.issuing.encoding import Fill, Template, filler, find_op
from monarch._engine.layouts.layout import Layout, Layouts
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.rank.programs.replaying import run_op
from monarch._engine.rank.shards.making import wrap
from monarch.exceptions import ArgumentError


class SimulatedProcs:
    """Processes that do not exist.

    Args:
        simulation: to which they belong.
        axes: names.
        sizes: the sizes of the axes.
    """

    name = "simulated"

    def __init__(self, simulation: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.extent = Extent(axes, sizes)
        self.tensor_mesh = SimulatedMesh(simulation, self)

    def size(self, axis: Any = None) -> int:
        """Return the number of ranks, in all or along an axis."""
        return Region.full(self.extent).size(axis)

    def slice(self, **coordinates: Any) -> Any:
        """Not known to simulations."""
        raise ArgumentError("a simulated mesh has no slices; make a Mesh of the shape of the slice")

    def stop(self) -> None:
        """Do nothing."""

    def __len__(self) -> int:
        return len(Region.full(self.extent))


class SimulatedMesh(TensorMesh):
    """A tensor mesh of simulated processes."""

    def __init__(self, simulation: Any, procs: SimulatedProcs) -> None:
        self.public: Any = procs
        self.procs: Any = procs
        self.region = Region.full(procs.extent)
        self.axes = tuple(procs.extent.labels)
        self.sizes = tuple(procs.extent.sizes)
        self.ranks = list(self.region.base_ranks())
        self.actors: Any = None
        self.first: Any = self.region.slice(**dict.fromkeys(self.axes, 0))
        self.device, self.kind = torch.device("cpu"), "cpu"
        self.device_mesh = mesh_without_groups("cpu", self.ranks, self.sizes, self.axes)
        self.layouts = Layouts(self)
        self.stream: Any = SimulatedStream(simulation, simulation.device_mesh(self.axes, self.sizes))
        self.recovery: Any = NoValues(self)
        self.plans: dict[Any, Any] = {}
        self._templates: dict[Any, int] = {}

    def __repr__(self) -> str:
        return f"<simulated mesh: {axes_text(self.region.extent)}>"


class SimulatedStream:
    """Runs each op at once, on fake shards. Used by the thread of the program; others only append to ``pending``."""

    def __init__(self, simulation: Any, mesh: Any) -> None:
        self._simulation = simulation
        self._mesh = mesh
        self.pending: Any = simulation.dropped
        self.live: dict[int, Layout] = {}
        self.templates: dict[int, Template] = {}
        self.values: dict[int, DTensor] = simulation.values
        self._ready: dict[int, tuple[Fill, Any]] = {}
        self._next = count(1)

    def tensors(self) -> list[tuple[int, Layout]]:
        """Return the tensors that the program holds, by reference."""
        return list(self.live.items())

    def template(self, template: Template) -> int:
        """Return the number of a new template."""
        number = next(self._next)
        self.templates[number] = template
        self._ready[number] = filler(template), find_op(template.op) if template.op else None
        return number

    def issue(self, number: int, inputs: Any, values: Any, outputs: Any, line: int) -> None:
        """Run an op."""
        template, (fill, op) = self.templates[number], self._ready[number]
        tensors: list[Any] = [self.values[each] for each in inputs]
        with self._simulation.rank(line):
            result = run_op(self._mesh, template, fill, op, tensors, values)
        found = list(cast("list[Any]", result)) if isinstance(result, list | tuple) else [result]
        for each, value in zip(outputs, found if outputs else (), strict=True):
            if each:
                self.values[each] = value

    def put(self, number: int, layout: Layout) -> None:
        """Take a value of the program: only its shape."""
        sizes, _ = shard_sizes(layout.shape, self._mesh.shape, self._mesh.get_coordinate(), layout.placements)
        with self._simulation.rank(0):
            local = torch.empty(sizes, dtype=layout.dtype)
            self.values[number] = wrap(local, self._mesh, layout.placements, layout.shape)
        self._simulation.meter.own(local, "inputs")

    def flush(self, wait: bool = True) -> None:
        """Do nothing: all ops have run."""


class NoValues:
    """Answers looks at values, which a simulation does not have."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def look(self, number: int, what: str, region: Any) -> list[Any]:
        """Return NaN or zeros to let the program continue."""
        value = self._mesh.stream.values[number]
        if what == "item":
            return [float("nan") if value.dtype.is_floating_point else 0]
        return [torch.zeros(value.to_local().shape, dtype=value.dtype) for _ in region.base_ranks()]

    def ask(self, send: Any) -> Any:
        """Refuse to run functions on ranks."""
        self.before_look()

    def before_look(self) -> None:
        """Likewise, before a function is sent."""
        raise ArgumentError(
            "a simulated mesh has no processes, so it runs no functions on ranks; only ops on tensors are simulated"
        )
