"""The source around the line of a frame of a rank, and the arguments of its function."""

from __future__ import annotations

import linecache
from types import FrameType

from monarch._actors.pausing.failed import failed
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import innermost, scope_of, text_of

AROUND = 5
"""Lines before and after the current one."""
_MOST = 300
"""Lines of a function that are shown."""
Packed = tuple[str, int, int, list[str], list[str]]


@service("source.lines_here", "probe")
def lines_here(level: int, whole: bool, around: int) -> Packed | str:
    """Service: return file, current line, first line, lines and names of arguments; or why there are none.

    Args:
        level: the level of the frame: 0 for the innermost one of the user's code, 1 for its caller.
        whole: all lines of the function, instead of some around the current one.
        around: a line to show instead of the current one; 0 for that.
    """
    try:
        frame = scope_of(level, innermost()).frame
    except LookupError as error:
        return text_of(error)
    if frame is None:
        return "no code is running here"
    code, line = frame.f_code, _line_of(frame)
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    centre = around or line
    first, last = max(1, centre - AROUND), centre + AROUND
    if whole:
        first = code.co_firstlineno if code.co_name != "<module>" else 1
        last = max((at for *_, at in code.co_lines() if at), default=line)
        last = len(lines) if code.co_name == "<module>" else last
    count = code.co_argcount + code.co_kwonlyargcount
    flags = bool(code.co_flags & 4) + bool(code.co_flags & 8)
    names = list(code.co_varnames[: count + flags])
    shown = [each.rstrip("\n") for each in lines[first - 1 : min(last, first + _MOST)]]
    return code.co_filename, line, max(1, first), shown, names


def _line_of(frame: FrameType) -> int:
    # Of an error, the line that has raised, not the one that has handled it.
    return next((line for each, line in failed.frames() if each is frame), frame.f_lineno)
