"""A graph becomes a Python function with a line for each op, so that the line of an error tells the op."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch import fx


class GraphSource:
    """The function of a graph.

    Attributes:
        text: its code.
        nodes: the node of each line, counted from 1; None for others.
        call: takes the inputs of the graph.
    """

    def __init__(self, module: fx.GraphModule, name: str) -> None:
        self.file = f"<recorded {name}>"
        self.nodes: list[fx.Node | None] = [None]
        self._names: dict[str, Any] = {}
        self._targets: dict[Any, str] = {}
        graph = module.graph
        last = _last_uses(graph)
        arguments = [node.name for node in graph.nodes if node.op == "placeholder"]
        lines = [f"def {_identifier(name)}({', '.join(arguments)}):"]
        self.nodes.append(None)
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                lines.append(f"    return {self._text(node.args[0])}")
            elif node.op == "get_attr":
                self._names[node.name] = getattr(module, str(node.target))
                continue
            else:
                line = f"    {node.name} = {self._call(node)}"
                dead = last.get(node, [])
                lines.append(line + (f"; {' = '.join(each.name for each in dead)} = None" if dead else ""))
            self.nodes.append(node)
        self.text = "\n".join(lines)
        exec(compile(self.text, self.file, "exec"), self._names)
        self.call: Any = self._names[_identifier(name)]

    def _call(self, node: fx.Node) -> str:
        target = node.target
        if target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        known = self._targets.get(target)
        if known is None:
            base = "".join(each if each.isalnum() else "_" for each in str(getattr(target, "__name__", target)))
            known = f"op_{base}"
            while known in self._names:
                known += "_"
            self._targets[target] = known
            self._names[known] = target
        given = [self._text(each) for each in node.args]
        given += [f"{key}={self._text(each)}" for key, each in node.kwargs.items()]
        return f"{known}({', '.join(given)})"

    def _text(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, list):
            return "[" + ", ".join(self._text(each) for each in cast("list[Any]", arg)) + "]"
        if isinstance(arg, tuple):
            return "(" + "".join(self._text(each) + ", " for each in cast("list[Any]", arg)) + ")"
        if arg is None or arg.__class__ in (int, bool, str):
            return repr(arg)
        for name, value in self._names.items():
            if value is arg:
                return name
        name = f"constant_{len(self._names)}"
        self._names[name] = arg
        return name

    def node_at(self, error: BaseException) -> fx.Node | None:
        """Return the node that raised an error."""
        found = None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                found = self.nodes[trace.tb_lineno]
            trace = trace.tb_next
        return found


def _identifier(name: str) -> str:
    return "step_" + "".join(each if each.isalnum() else "_" for each in name)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that no later node uses."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        if node.op in ("placeholder", "get_attr"):
            continue
        dead = [each for each in node.all_input_nodes if each not in seen and each.op != "get_attr"]
        if not node.users:
            dead.append(node)
        found[node] = dead
        seen.update(node.all_input_nodes)
        seen.add(node)
    return found
