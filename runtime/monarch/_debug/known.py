"""Whether a rank knows the code of a breakpoint: one in code that nobody has loaded may be a misspelt name."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from monarch._actors.pausing.points import FUNCTION
from monarch._node.services.registry import service


@service("known.known_here", "probe")
def known_here(kind: str, where: str) -> bool:
    """Service: return whether this rank has loaded a function, or a file.

    Args:
        kind: LINE or FUNCTION of a breakpoint.
        where: a path or its end; or the name of a function, perhaps with those of its class and module.
    """
    if kind != FUNCTION:
        files = [str(getattr(each, "__file__", None) or "") for each in list(sys.modules.values())]
        return any(each == where or each.endswith(os.sep + where.lstrip("./")) for each in files)
    return any(name == where or name.endswith(f".{where}") for name in _names(where.rpartition(".")[2]))


def _names(last: str) -> Iterator[str]:
    """Yield the full names of the functions that have a name."""
    # Those from before the fork of this process are not among the objects that can be listed.
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        yield from _named(names.get(last), last)
        for each in list(names.values()):
            # Not isinstance, which asks objects that only stand for others.
            if issubclass(type(each), type):
                own: dict[str, Any] = type.__getattribute__(each, "__dict__")
                yield from _named(own.get(last), last)
    for each in gc.get_objects():
        yield from _named(each, last)


def _named(value: Any, last: str) -> Iterator[str]:
    function = getattr(value, "__wrapped__", value) if type(value) is FunctionType else value
    if type(function) is FunctionType:
        code: CodeType = function.__code__
        if code.co_name == last:
            yield f"{function.__module__}.{function.__qualname__.replace('.<locals>', '')}"
