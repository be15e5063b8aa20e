"""Recorded steps on this rank: made a graph at the first call, and run as one op of the stream from then on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monarch._engine.dtensor_compat import dtensor_over, shard_of_dtensor
from monarch._engine.issuing.encoding import Fill, Template
from monarch._engine.rank.devices.meshes import is_unregistered
from monarch._engine.rank.functions.calling import title_of
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._engine.rank.programs.accounts import OpRow, rows_of
from monarch._engine.rank.programs.lowering import ORIGIN, lower
from monarch._engine.rank.programs.passes import memory_of, shorten, written
from monarch._engine.rank.programs.program import RecordedProgram, ReplayError
from monarch._engine.rank.programs.sources import GraphSource
from monarch._groups.failures import broke
from monarch.exceptions import GroupError


class _Ready:
    """A recorded step that can run, over the process groups of one DeviceMesh."""

    def __init__(self, program: RecordedProgram, mesh: Any, tensors: list[Any]) -> None:
        self.program = program
        self.mesh = mesh
        lowered = lower(program, mesh, tensors, run_op)
        shorten(lowered.graph.graph)
        self.specs = lowered.specs
        self.writes_early = _writes_before_collectives(lowered.graph.graph)
        self.rows = rows_of(lowered.graph.graph, mesh, program)
        self.source = GraphSource(lowered.graph, program.name)
        self.text = self.source.text
        if program.backend == "inductor":
            from monarch._engine.rank.programs.inductor import compiled

            self.source = GraphSource(compiled(lowered.graph), program.name)

    def run(self, tensors: list[Any], values: Any) -> list[Any]:
        """Return the outputs.

        Raises:
            GroupError: a collective was cut, and the step can run again as a whole.
            ReplayError: an op failed.
        """
        try:
            with torch.no_grad():
                shards = self.source.call(*[shard_of_dtensor(each) for each in tensors], *values)
        except Exception as error:
            cut = isinstance(error, GroupError) or broke(error) or is_unregistered(error)
            if cut and not self.writes_early:
                raise
            raise self._told(error, cut) from error
        return [dtensor_over(shard, spec) for shard, spec in zip(shards, self.specs, strict=True)]

    def _told(self, error: Exception, cut: bool) -> Exception:
        node = self.source.node_at(error)
        at: int | None = node.meta.get(ORIGIN) if node is not None else None
        if at is None:
            return error
        step = self.program.steps[at]
        template = self.program.templates[step.template]
        if cut:
            error = RuntimeError(f"a collective was aborted after the step had changed some tensors in place: {error}")
        return ReplayError(title_of(template), step.line, error)


_ready: dict[int, _Ready] = {}
"""By uid of the recording. Used by the thread of the executor."""
_refused: dict[int, str] = {}
"""Why there is no graph, likewise."""
REPLAY = "replay"
"""Kind of the op that runs a recorded step."""
PREPARE = "prepare"
"""The number of a message that only makes the graph."""


def run_op(mesh: Any, template: Template, fill: Fill, op: Any, tensors: list[Any], values: Any) -> Any:
    """Run an op on DTensors, as the executor does."""
    args, kwargs = fill(tensors, values)
    if template.kind == "aten":
        return op(*args, **kwargs)
    return OPERATIONS[template.kind](mesh, op, tensors, values, args, kwargs)


def _replay(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> list[Any]:
    program: RecordedProgram = args[0]
    if values and values[0] == PREPARE:
        return _prepare(program, mesh, tensors)
    ready = _ready.get(program.uid)
    if ready is None or ready.mesh is not mesh:
        ready = _ready[program.uid] = _Ready(program, mesh, tensors)
    return ready.run(tensors, values)


def _prepare(program: RecordedProgram, mesh: Any, tensors: list[Any]) -> list[Any]:
    """Make the graph; what fails is told by ``describe``, so that no tensor loses its value."""
    try:
        _ready[program.uid] = _Ready(program, mesh, tensors)
    except Exception as error:
        _refused[program.uid] = f"{type(error).__name__}: {error}"
    return []


def _forget(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> list[Any]:
    _ready.pop(values[0], None)
    _refused.pop(values[0], None)
    return []


OPERATIONS[REPLAY] = _replay
OPERATIONS["forget"] = _forget


def describe(uid: int) -> tuple[str, list[OpRow]] | str | None:
    """Return the code of a recorded step, and what each of its ops costs; the error if it has no graph; None if a
    tensor that it takes has no value."""
    ready = _ready.get(uid)
    return (ready.text, ready.rows) if ready is not None else _refused.get(uid)


def _writes_before_collectives(graph: fx.Graph) -> bool:
    """Return whether the step changes its inputs before its last collective: then it cannot run twice."""
    inputs = {memory_of(node) for node in graph.nodes if node.op == "placeholder"} - {None}
    wrote = False
    for node in graph.nodes:
        if any(memory_of(each) in inputs for each in written(node)):
            wrote = True
        elif wrote and "c10d" in str(node.target):
            return True
    return False
