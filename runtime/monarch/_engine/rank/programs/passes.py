"""Shortens the graph of a recorded step: no copies of metadata, no dead ops, few collectives."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from monarch._engine.dtensor_compat import functional_collectives, is_op, memory_id, schema_of
from monarch._engine.rank.programs.lowering import ORIGIN, DTensorOp

aten: Any = torch.ops.aten
c10d = functional_collectives
_SAME = {aten.detach.default, aten.alias.default}
WAIT = c10d.wait_tensor.default
ALL_REDUCE = c10d.all_reduce.default
COALESCED = c10d.all_reduce_coalesced.default
_BUCKET = 25 << 20
"""Bytes of one combined all-reduce."""


def shorten(graph: fx.Graph) -> None:
    """Run all passes, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    drop_dead(graph)
    coalesce(graph)
    graph.lint()


def drop_dead(graph: fx.Graph) -> None:
    """Drop ops whose results nobody uses, and those that change only memory that nobody reads afterwards.

    DTensor runs each op once more on tensors without values, to learn the shapes of its results, and make_fx notes that
    too. A fused step of AdamW there would take 50 ms of the CPU in each call.
    """
    # Reversed, since the readers of some memory decide whether an earlier write matters.
    matters: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            matters.update(_memories(node))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _acts(node, matters):
            graph.erase_node(node)
            continue
        for each in (node, *node.all_input_nodes):
            matters.update(_memories(each))


def _acts(node: fx.Node, matters: set[int]) -> bool:
    """Return whether a node whose result is not used does anything else that matters.

    Args:
        node: an op.
        matters: the memory that later nodes use.
    """
    changed = written(node)
    if changed:
        return "c10d" in str(node.target) or any(not _memories(each) or matters & _memories(each) for each in changed)
    op: Any = node.target
    if not is_op(op):
        return node.is_impure()
    if torch.Tag.nondeterministic_seeded in op.tags:
        # Random ops that matter are whole; ``empty`` has this tag too.
        return False
    return "c10d" in str(op) or not schema_of(op).returns or node.is_impure()


def _memories(node: fx.Node) -> set[int]:
    """Return what identifies the memory of the results of a node."""
    value = node.meta.get("val")
    values: list[Any] = list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]
    return {memory_id(each) for each in values if isinstance(each, torch.Tensor)}


def written(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an op changes in place."""
    if isinstance(node.target, DTensorOp):
        shards: Any = node.args[1:]
        return [shards[at] for at in node.target.writes]
    schema = _schema_at(node)
    if schema is None or not schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given: Any = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        listed: list[Any] = list(cast("list[Any]", given)) if isinstance(given, list | tuple) else [given]
        found.extend(each for each in listed if isinstance(each, fx.Node))
    return found


def _schema_at(node: fx.Node) -> Any:
    return schema_of(node.target) if is_op(node.target) else None


def memory_of(node: fx.Node) -> int | None:
    """Return what identifies the memory of a fake tensor."""
    value = node.meta.get("val")
    return memory_id(value) if isinstance(value, torch.Tensor) else None


class _Pending:
    """All-reduces of one kind whose results nobody has used yet."""

    def __init__(self) -> None:
        self.pairs: list[tuple[fx.Node, fx.Node]] = []
        self.bytes = 0


def coalesce(graph: fx.Graph) -> None:
    """Combine all-reduces, each done as late as its first use allows."""
    pending: dict[Any, _Pending] = {}
    waits: dict[fx.Node, Any] = {}
    memory: dict[int | None, Any] = {}

    def flush(key: Any, before: fx.Node) -> None:
        group = pending.pop(key, None)
        if group is None:
            return
        for reduce, wait in group.pairs:
            waits.pop(wait, None)
            memory.pop(memory_of(_input(reduce)), None)
        _emit(graph, group.pairs, before)

    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is ALL_REDUCE:
            users = list(node.users)
            if len(users) == 1 and users[0].target is WAIT:
                source = _input(node)
                if source in waits:
                    flush(waits[source], node)
                value = node.meta["val"]
                key = (node.args[1], node.args[2], value.dtype)
                found = pending.setdefault(key, _Pending())
                found.pairs.append((node, users[0]))
                found.bytes += value.numel() * value.element_size()
                waits[users[0]] = key
                memory[memory_of(source)] = key
                continue
        if node in waits:
            if pending[waits[node]].bytes >= _BUCKET:
                flush(waits[node], node)
            continue
        for each in node.all_input_nodes:
            if each in waits:
                flush(waits[each], node)
        for each in written(node):
            key = memory.get(memory_of(each))
            if key is not None:
                flush(key, node)


def _input(reduce: fx.Node) -> fx.Node:
    source = reduce.args[0]
    assert isinstance(source, fx.Node)
    return source


def _emit(graph: fx.Graph, pairs: list[tuple[fx.Node, fx.Node]], before: fx.Node) -> None:
    first = pairs[0][0]
    with graph.inserting_before(before):
        if len(pairs) == 1:
            made = [graph.node_copy(first, lambda node: node)]
        else:
            sources = [_input(reduce) for reduce, _ in pairs]
            whole = graph.call_function(COALESCED, (sources, first.args[1], first.args[2]))
            whole.meta[ORIGIN] = first.meta.get(ORIGIN)
            whole.meta["val"] = [reduce.meta["val"] for reduce, _ in pairs]
            made = [graph.call_function(operator.getitem, (whole, at)) for at in range(len(pairs))]
        for each, (reduce, wait) in zip(made, pairs, strict=True):
            each.meta = dict(reduce.meta)
            done = graph.call_function(WAIT, (each,))
            done.meta = dict(wait.meta)
            wait.replace_all_uses_with(done)
    for reduce, wait in pairs:
        graph.erase_node(wait)
        graph.erase_node(reduce)
