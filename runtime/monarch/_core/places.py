"""The line of user code that a thread runs."""

from __future__ import annotations

import os
import re
import sysconfig
from types import FrameType

_CELL = re.compile(r"cell \[\d+\]")
_MARIMO = re.compile(r"__marimo__cell_(\w+)_\.py")
"""The files that marimo compiles its cells as, by the id of the cell."""
_DEPTH = 200
"""Frames that are searched."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
    _OURS,
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
    "<frozen",
    "<string>",
)
"""Beginnings of file names; "<string>" is that of the methods of named tuples and data classes."""
_MOST = 5000
_shown: dict[str, str] = {}
"""By file name, the shown one; empty for a library. Single dict operations, by any thread."""


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of a cell, as in ``cell [3] line 5``; without one, of the user's code; or an empty
    string."""
    user = ""
    for _ in range(_DEPTH):
        if frame is None:
            break
        name = _name_of(frame.f_code.co_filename)
        if name.startswith("cell ["):
            return f"{name} line {frame.f_lineno}"
        if name and not user:
            user = f"{name} line {frame.f_lineno}"
        frame = frame.f_back
    return user


def is_users(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code, rather than of this package or of an installed library."""
    return bool(_name_of(frame.f_code.co_filename))


def is_users_file(file: str) -> bool:
    """Return the same of the file of a frame."""
    return bool(_name_of(file))


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame is of this package."""
    return frame.f_code.co_filename.startswith(_OURS)


def _name_of(file: str) -> str:
    found = _shown.get(file)
    if found is None:
        if len(_shown) > _MOST:
            _shown.clear()
        found = _shown[file] = _shown_name(file)
    return found


def _shown_name(file: str) -> str:
    if _CELL.fullmatch(file):
        return file
    installed = "site-packages" in file or "dist-packages" in file
    if installed or file.startswith(_LIBRARIES):
        return ""
    name = os.path.basename(file)
    marimo = _MARIMO.fullmatch(name)
    return f"cell {marimo[1]}" if marimo is not None else name
