"""A cell inside an actor: its ``self`` is the actor, its other names are those of the rank's namespace."""

from __future__ import annotations

import ast
import sys
from collections.abc import Coroutine
from typing import Any

from monarch._actors.running import current
from monarch._node.services.registry import service
from monarch._notebook.magics.shell import offer
from monarch._notebook.running.execute import CellResult, run, run_async, steps_of
from monarch._notebook.showing.display import Display


@service("inside.run_in_actor", "actor", "the cell")
def run_in_actor(
    instance: Any, source: str, name: str, sink: Any, typed: str = ""
) -> CellResult | Coroutine[Any, Any, CellResult]:
    """Run a cell; on an event loop its ``await`` lets other messages of the actor continue."""
    here = current.get()
    assert here is not None
    variables = sys.modules["__main__"].__dict__
    # Several actors of a process may run cells at the same time, in one namespace.
    hidden = f"__self_{here[0].key.replace('-', '_')}__"
    variables[hidden] = instance
    here[0].at_end[hidden] = lambda: variables.pop(hidden, None)
    offer(variables, bool(typed))
    steps = steps_of(source, name, variables, Display(), sink, _Renamer(hidden), typed)
    return run(steps) if here[0].executor.loop is None else run_async(steps)


class _Renamer(ast.NodeTransformer):
    """Puts another name in the place of ``self``, save where it is the parameter of a function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == "self":
            return ast.copy_location(ast.Name(self.name, node.ctx), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self._function(node)

    def _function(self, node: Any) -> ast.AST:
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        if not any(each is not None and each.arg == "self" for each in names):
            return self.generic_visit(node)
        # Defaults and decorators are outside of the function.
        for part in (arguments, *getattr(node, "decorator_list", ())):
            self.generic_visit(part) if part is arguments else self.visit(part)
        return node
