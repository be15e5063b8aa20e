"""Whether code of a cell must run on an event loop, or must not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_NEEDS = {"create_task", "get_running_loop", "current_task"}
_OWN = {"run_until_complete", "run_forever"}
_WORDS = re.compile("asyncio|Runner|" + "|".join(sorted(_NEEDS | _OWN)))
_ELSEWHERE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def speaks_of_loops(source: str) -> bool:
    """Return whether code has a word that the functions below look for: hardly any cell does, and looking is slow."""
    return _WORDS.search(source) is not None


def needs_loop(tree: ast.AST) -> bool:
    """Return whether the statements themselves ask for the running loop, such as ``asyncio.create_task(f())``."""
    return any(_is_of_asyncio(call, _NEEDS) for call in _calls(tree))


def runs_loop(tree: ast.AST) -> bool:
    """Return whether the statements themselves run a loop, such as ``asyncio.run(main())``: none may run around it."""
    return any(_is_of_asyncio(call, {"run", "Runner"}) or _attribute(call) in _OWN for call in _calls(tree))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls outside of functions; those inside run when somebody calls them."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Call):
            yield child
        if not isinstance(child, _ELSEWHERE):
            yield from _calls(child)


def _is_of_asyncio(call: ast.Call, names: set[str]) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in names - {"run"}
    return _attribute(call) in names and isinstance(function, ast.Attribute) and _is_asyncio(function.value)


def _is_asyncio(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "asyncio"


def _attribute(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
