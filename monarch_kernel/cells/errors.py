"""Errors of Monarch as a notebook shows them: the person's own frames, and none of this package's."""

from __future__ import annotations

import argparse
import asyncio
import linecache
import os
import re
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from monarch._kernel_api import is_ours
from monarch.exceptions import MonarchError
from monarch_kernel.cells.running import Running
from monarch_kernel.cells.stop import Stopped, uninterrupted
from monarch_kernel.compat import cell_number, show_traceback
from monarch_kernel.output.render import CellStopped

_MAGIC = re.compile(r"get_ipython\(\)\.run_(?P<kind>cell|line)_magic\('(?P<name>\w+)', '(?P<line>(?:[^'\\]|\\.)*)'")
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def install(shell: Any) -> None:
    """Has errors of Monarch shown in this way."""
    # HeaderError is a ValueError, as everything else that says that a line cannot be understood.
    from monarch_kernel.magics.header import HeaderError

    shell.set_custom_exc((MonarchError, HeaderError, KeyboardInterrupt, asyncio.CancelledError), show)


def show(
    shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None, tb_offset: Any = None
) -> None:
    """Shows an error: where the notebook was, and what it says. IPython drops a function of this kind that raises."""
    with uninterrupted():
        _show(shell, kind, error, tb)


def _show(shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    lines = [f"{kind.__name__}: {error}" if str(error) else kind.__name__]
    if isinstance(error, asyncio.CancelledError):
        if not getattr(getattr(shell, "kernel", None), "stopped_await", False):
            # Of the person's own doing.
            shell.showtraceback((kind, error, tb))
            return
        kind, error = KeyboardInterrupt, KeyboardInterrupt("the cell was stopped while it awaited something")
        lines = [f"KeyboardInterrupt: {error}"]
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, CellStopped):
        stopped = stop_calls(shell)
        if stopped is None and not error.args and not _waits(tb):
            # The notebook's own code was stopped, and no rank.
            shell.showtraceback((kind, error, _without_handler(tb)))
            return
        if stopped is not None:
            print(stopped.text(), file=sys.stderr)
    for frame, number in _of_person(tb) if isinstance(error, KeyboardInterrupt) else traceback.walk_tb(tb):
        name = frame.f_code.co_filename
        if _is_internal(name) or f"{os.sep}IPython{os.sep}" in name or name == argparse.__file__:
            continue
        lines.append(f"  {_place(shell, name)} line {number}: {_as_typed(linecache.getline(name, number).strip())}")
    show_traceback(shell, kind, error, [lines[0], *lines[1:][-5:]])


def _without_handler(tb: TracebackType | None) -> TracebackType | None:
    """A traceback that ends where the interrupt has come."""
    last = tb
    while last is not None and last.tb_next is not None:
        if last.tb_next.tb_next is None and last.tb_next.tb_frame.f_code.co_filename.startswith(_HERE):
            last.tb_next = None
            break
        last = last.tb_next
    return tb


def _of_person(tb: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames of an interrupt down to where a cell has called this package, and those of cells below that."""
    frames = list(traceback.walk_tb(tb))
    ours = [at for at, (frame, _) in enumerate(frames) if _is_internal(frame.f_code.co_filename)]
    return frames[: ours[0]] + [each for each in frames[ours[0] :] if _is_of_cell(each[0])] if ours else frames


def _waits(tb: TracebackType | None) -> bool:
    """Whether an interrupt has come in the middle of a call of this package, and not in code of a cell that it runs."""
    inside = False
    # The handler of the interrupt is on top of what was interrupted.
    for frame, _ in list(traceback.walk_tb(tb))[:-1]:
        inside = not _is_of_cell(frame) and (inside or _is_internal(frame.f_code.co_filename))
    return inside


def _is_of_cell(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "__main__"


def _is_internal(name: str) -> bool:
    return is_ours(name) or name.startswith(_HERE)


def stop_calls(shell: Any) -> Stopped | None:
    """Stops the ranks that are at calls of the cell that runs; None if there are none."""
    magics = shell.magics_manager.registry.get("MeshMagics")
    kernel = getattr(shell, "kernel", None)
    if magics is None or kernel is None:
        return None
    cell = (kernel.get_parent("shell") or {}).get("header", {}).get("msg_id", "")
    futures = magics.calls_of(cell)
    if not futures:
        return None
    return magics.stop_calls(Running("", futures), None)


def _as_typed(line: str) -> str:
    """A line of a cell as the person has typed it, which IPython makes a call of if it is a magic."""
    found = _MAGIC.match(line)
    if found is None:
        return line
    return f"{'%%' if found['kind'] == 'cell' else '%'}{found['name']} {found['line']}".rstrip()


def _place(shell: Any, name: str) -> str:
    number = cell_number(shell, name)
    return name if number is None else f"cell [{number}]"
