"""The cost of the ops of a recorded step on this rank: torch's own counters of FLOPs, and bytes by shape."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from monarch._engine.dtensor_compat import map_nodes
from monarch._engine.rank.programs.lowering import ORIGIN
from monarch._engine.rank.programs.program import RecordedProgram


class OpRow(NamedTuple):
    """An op of the graph.

    Attributes:
        op: its name.
        line: number of the line that issued the op it comes from; 0 for none.
        flops: floating point operations.
        size: bytes that it reads and writes.
        axis: the axis of the mesh, for a collective.
        sent: bytes that a collective takes in.
    """

    op: str
    line: int
    flops: int
    size: int
    axis: str | None
    sent: int


def rows_of(graph: fx.Graph, mesh: Any, program: RecordedProgram) -> list[OpRow]:
    """Return a row for each op."""
    axes = {mesh.get_group(at).group_name: name for at, name in enumerate(mesh.mesh_dim_names or ())}
    found: list[OpRow] = []
    for node in graph.nodes:
        if node.op != "call_function" or "getitem" in str(node.target) or "wait_tensor" in str(node.target):
            continue
        at: int | None = node.meta.get(ORIGIN)
        line = program.steps[at].line if at is not None else 0
        name = str(node.target)
        taken = sum(_bytes(each) for each in node.all_input_nodes)
        if "_c10d_functional" in name:
            axis = next((axes[arg] for arg in node.args if isinstance(arg, str) and arg in axes), "")
            found.append(OpRow(name, line, 0, taken, axis, taken))
        else:
            size = 0 if _is_view(node) else taken + _bytes(node)
            found.append(OpRow(name, line, _flops(node), size, None, 0))
    return found


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _bytes(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    tensors = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))


def _value(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, fx.Node) else arg


def _flops(node: fx.Node) -> int:
    packet: Any = getattr(node.target, "overloadpacket", None)
    count: Any = flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs = map_nodes(node.args, _value), map_nodes(node.kwargs, _value)
    return int(count(*args, **kwargs, out_val=node.meta.get("val")))
