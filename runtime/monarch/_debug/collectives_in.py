"""Functions in code that wait for other ranks: on a paused rank they would wait for ranks that do other things."""

from __future__ import annotations

import ast
from typing import Literal

_COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "full_tensor", "gather_object", "monitored_barrier", "recv",
    "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list", "send",
}  # fmt: skip
"""Functions that wait for other ranks, whatever they are called on."""


def collective_in(source: str, mode: Literal["eval", "exec"] = "eval") -> str:
    """Return the first function in an expression, or in statements, that waits for other ranks; empty if none does."""
    for node in ast.walk(ast.parse(source, mode=mode)):
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name in _COLLECTIVES:
            return name
    return ""
