"""A recorded step becomes a graph of ops on this rank's shards and collectives.

The ops run once on DTensors over fake shards; make_fx notes what torch runs on the shards. Random ops stay whole: they
run on DTensors in each call, as they do when they are not recorded, so that they draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx, track_tensor_tree

from monarch._engine.dtensor_compat import dtensor_over, last_node, map_nodes, shard_of_dtensor, spec_of_dtensor
from monarch._engine.issuing.encoding import Fill, Template, filler, find_op
from monarch._engine.rank.devices.on_device import on_device
from monarch._engine.rank.programs.program import RecordedProgram, Slot

RunOp = Callable[[Any, Template, Fill, Any, list[Any], Any], Any]
"""Runs an op on DTensors: mesh, template, its filler, op, tensors, numbers."""


class Lowered(NamedTuple):
    """A recorded step on this rank.

    Attributes:
        graph: takes the shards of the inputs and the numbers, and returns the shards of the outputs.
        specs: torch's descriptions of the outputs.
    """

    graph: fx.GraphModule
    specs: list[Any]


ORIGIN = "recorded"
"""Key in the meta of a node: the index of the recorded op that it comes from."""


class DTensorOp:
    """A recorded op that runs on DTensors in each call. A node of the graph calls it with its numbers and shards.

    Attributes:
        writes: indices of the shards that it changes in place.
    """

    def __init__(self, run: Callable[[list[Any], Any], Any], specs: list[Any], writes: tuple[int, ...]) -> None:
        self.writes = writes
        self._run = run
        self._specs = specs
        self.__name__ = self.__qualname__ = "whole"
        self.__module__ = __name__

    def __call__(self, values: Any, *shards: torch.Tensor) -> list[Any]:
        tensors = [dtensor_over(shard, spec) for shard, spec in zip(shards, self._specs, strict=True)]
        return [shard_of_dtensor(each) for each in _listed(self._run(tensors, values))]


def _listed(result: Any) -> list[Any]:
    return list(cast("list[Any]", result)) if isinstance(result, list | tuple) else [result]


def lower(program: RecordedProgram, mesh: Any, tensors: list[Any], run_op: RunOp) -> Lowered:
    """Return the graph of a recorded step.

    Args:
        program: the step.
        mesh: the DeviceMesh of this rank.
        tensors: DTensors as the step gets them; only their metadata matter.
        run_op: runs an op on DTensors.
    """
    specs = [spec_of_dtensor(tensor) for tensor in tensors]
    templates = [on_device(template, mesh.device_type) for template in program.templates]
    fills = [filler(template) for template in templates]
    ops = [find_op(template.op) if template.op else None for template in templates]
    stand_ins = [_stand_in(place, value) for place, value in enumerate(program.examples)]
    out_specs: list[Any] = []

    def trace(*shards: torch.Tensor) -> list[torch.Tensor]:
        tracing: Any = get_proxy_mode()
        graph: fx.Graph = tracing.tracer.graph
        held: dict[int, Any] = {
            at: dtensor_over(shard, spec) for at, (shard, spec) in enumerate(zip(shards, specs, strict=True))
        }
        last = last_node(graph)
        for at, step in enumerate(program.steps):
            template, fill, op = templates[step.template], fills[step.template], ops[step.template]
            inputs = [held[each] for each in step.inputs]
            values = tuple(stand_ins[each.place] if isinstance(each, Slot) else each for each in step.values)

            def run(given: list[Any], numbers: Any, template: Any = template, fill: Any = fill, op: Any = op) -> Any:
                return run_op(mesh, template, fill, op, given, numbers)

            found = _whole(tracing, run, inputs, values, template.writes) if step.is_random else run(inputs, values)
            for slot, value in zip(step.outputs, _listed(found) if step.outputs else (), strict=False):
                if slot >= 0:
                    held[slot] = value
            newest = last_node(graph)
            while last is not newest:
                last = last.next
                last.meta[ORIGIN] = at
        results: list[torch.Tensor] = []
        for slot in program.outputs:
            results.append(shard_of_dtensor(held[slot]))
            out_specs.append(spec_of_dtensor(held[slot]))
        return results

    with torch.no_grad():
        shards = [shard_of_dtensor(tensor) for tensor in tensors]
        made = make_fx(trace, tracing_mode="fake", _allow_non_fake_inputs=True)(*shards)
    return _with_numbers(made, program, stand_ins, out_specs)


def _stand_in(place: int, value: Any) -> Any:
    """Return a number that is like one of the recorded call, and that no other argument is equal to."""
    if isinstance(value, int):
        return value
    return value + (place + 1) * 1.2345e-9 * max(abs(value), 1e-3)


def _whole(tracing: Any, run: Any, inputs: list[Any], values: Any, writes: tuple[int, ...]) -> Any:
    """Add a node that runs an op on DTensors, and return its fake results."""
    shards = [shard_of_dtensor(each) for each in inputs]
    with disable_proxy_modes_tracing():
        found = _listed(run(inputs, values))
    node = DTensorOp(run, [spec_of_dtensor(each) for each in inputs], writes)
    tracer = tracing.tracer
    found_proxies = [tracer.unwrap_proxy(shard) for shard in shards]
    proxies = [each if isinstance(each, fx.Proxy) else each.proxy for each in found_proxies]
    proxy = tracer.create_proxy("call_function", node, (list(values), *proxies), {})
    fakes = [shard_of_dtensor(each) for each in found]
    track_tensor_tree(fakes, proxy, constant=None, tracer=tracer)
    return [dtensor_over(fake, spec_of_dtensor(each)) for fake, each in zip(fakes, found, strict=True)]


def _with_numbers(made: fx.GraphModule, program: RecordedProgram, stand_ins: list[Any], specs: list[Any]) -> Lowered:
    """Make the numbers that are new in each call inputs of the graph."""
    graph = made.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    by_value: dict[Any, fx.Node] = {}
    for place, value in enumerate(stand_ins):
        with graph.inserting_before(first):
            by_value[value] = graph.placeholder(f"number_{place}")
    used: set[fx.Node] = set()

    def put(arg: Any) -> Any:
        if arg.__class__ in (float, int) and arg in by_value and arg.__class__ in kinds:
            used.add(by_value[arg])
            return by_value[arg]
        return arg

    kinds = {value.__class__ for value in stand_ins}
    own = set(by_value.values())
    for node in graph.nodes:
        if node in own or node.op != "call_function":
            continue
        node.args = map_nodes(node.args, put)
        node.kwargs = map_nodes(node.kwargs, put)
    missing = [place for place, value in enumerate(stand_ins) if by_value[value] not in used]
    wanted = {value.place for step in program.steps for value in step.values if isinstance(value, Slot)}
    lost = [place for place in missing if place in wanted]
    if lost:
        step = next(s for s in program.steps if any(isinstance(v, Slot) and v.place in lost for v in s.values))
        raise RuntimeError(
            f"a number that changes from call to call would be fixed in the graph: {program.lines.get(step.line, '')}"
        )
    made.recompile()
    return Lowered(made, specs)
