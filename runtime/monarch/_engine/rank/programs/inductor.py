"""``backend="inductor"``: the ops between collectives and random ops are compiled."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.passes.split_module import split_module

from monarch._engine.dtensor_compat import inductor
from monarch._engine.rank.programs.lowering import DTensorOp

_LEAST = 2
"""Ops in a part that is worth to be compiled."""


def compiled(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with compiled parts.

    Args:
        module: with a fake tensor in the meta of each node.
    """
    parts: dict[fx.Node, int] = {}
    number = 0
    for node in module.graph.nodes:
        if _is_fixed(node):
            parts[node] = number + 1
            number += 2
        else:
            parts[node] = number
    fixed = {at for node, at in parts.items() if _is_fixed(node)}
    split = split_module(module, module, lambda node: parts[node], keep_original_order=True)
    for node in split.graph.nodes:
        if node.op != "call_module":
            continue
        inner: Any = split.get_submodule(str(node.target))
        if int(str(node.target).rpartition("_")[2]) in fixed or _size(inner.graph) < _LEAST:
            node.target, node.op = inner.forward, "call_function"
        else:
            node.target, node.op = _compiled_part(inner), "call_function"
    return split


def _is_fixed(node: fx.Node) -> bool:
    # A compiled part would keep the number of the first call.
    if any(each.op == "placeholder" and "val" not in each.meta for each in node.all_input_nodes):
        return True
    return isinstance(node.target, DTensorOp) or "c10d" in str(node.target)


def _size(graph: fx.Graph) -> int:
    return sum(node.op == "call_function" for node in graph.nodes)


def _compiled_part(inner: fx.GraphModule) -> Any:
    examples: list[Any] = [node.meta["val"] for node in inner.graph.nodes if node.op == "placeholder"]
    return inductor(inner, examples)
