"""Errors of Monarch as a notebook shows them: the person's own frames, and none of this package's."""

from __future__ import annotations

import linecache
import os
import traceback
from types import TracebackType
from typing import Any

from monarch._actors.failures import is_ours
from monarch.exceptions import MonarchError

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def install(shell: Any) -> None:
    """Has errors of Monarch shown in this way."""
    # HeaderError is a ValueError, as everything else that says that a line cannot be understood.
    from monarch_kernel.header import HeaderError

    shell.set_custom_exc((MonarchError, HeaderError), show)


def show(
    shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None, tb_offset: Any = None
) -> None:
    """Shows an error: where the notebook was, and what it says."""
    lines = [f"{kind.__name__}: {error}"]
    for frame, number in traceback.walk_tb(tb):
        name = frame.f_code.co_filename
        if is_ours(name) or name.startswith(_HERE) or f"{os.sep}IPython{os.sep}" in name:
            continue
        lines.append(f"  {_place(shell, name)} line {number}: {linecache.getline(name, number).strip()}")
    shell._showtraceback(kind, error, [lines[0], *lines[1:][-5:]])


def _place(shell: Any, name: str) -> str:
    cells = getattr(shell.compile, "_filename_map", {})
    return f"cell [{cells[name]}]" if name in cells else name
