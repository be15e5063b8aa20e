"""Writing the local variables of a function that is being called."""

from __future__ import annotations

import ast
import ctypes
import sys
from types import FrameType
from typing import Any

_TRIES = 3
"""Another thread that looks at the frame may read its variables back in between, before Python 3.13."""
_OWN = {"_", "__builtins__"}
"""Names that running code leaves behind."""


def write_back(frame: FrameType, source: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Give the frame of a function the variables that some code has changed in a copy of them.

    Args:
        frame: the frame of the function, which is not running just now.
        source: the code, which may declare names to be global.
        before: its variables before the code has run.
        after: those afterwards.
    """
    absent = object()
    changed = {name: value for name, value in after.items() if before.get(name, absent) is not value}
    deleted = {name for name in before if name not in after}
    shared = declared_global(source)
    for name in _OWN:
        changed.pop(name, None)
    for name in shared & changed.keys():
        frame.f_globals[name] = changed.pop(name)
    for name in shared & deleted:
        frame.f_globals.pop(name, None)
    write_locals(frame, changed, deleted - shared)


def declared_global(source: str) -> set[str]:
    """Return the names that ``global`` statements name; none for code that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def write_locals(frame: FrameType, changed: dict[str, Any], deleted: set[str]) -> None:
    """Set and delete local variables; names that the function does not have are kept for later looks at the frame.

    Args:
        frame: the frame of the function, which is not running just now.
        changed: new values by name.
        deleted: names; from Python 3.13 on they are kept, since a frame cannot lose variables.
    """
    if sys.version_info >= (3, 13):
        # A proxy that writes through.
        frame.f_locals.update(changed)
        return
    for _ in range(_TRIES):
        local: Any = frame.f_locals
        local.update(changed)
        for name in deleted:
            local.pop(name, None)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(1))
        local = frame.f_locals
        if all(name in local and local[name] is value for name, value in changed.items()):
            return
