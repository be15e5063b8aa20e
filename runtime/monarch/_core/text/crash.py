"""The report of faulthandler about a crash, without the lines that say nothing about its cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_FATAL = "Fatal Python error: "
_CURRENT = "Current thread "
_FRAME = re.compile(r'  File "(.*)", line \d+ in ')


def crash_lines(lines: Sequence[str], is_hidden: Callable[[str], bool]) -> list[str]:
    """Return the kind of the crash and the frames of the thread that crashed; nothing if the lines have no such dump.

    Args:
        lines: lines of stderr.
        is_hidden: tells of the file of a frame whether to leave it out.
    """
    current = max((number for number, line in enumerate(lines) if line.startswith(_CURRENT)), default=None)
    if current is None:
        return []
    fatal = [line for line in lines[:current] if line.startswith(_FATAL)][-1:]
    frames: list[str] = []
    for line in lines[current + 1 :]:
        match = _FRAME.match(line)
        if match is None:
            break
        if not is_hidden(match[1]):
            frames.append(line)
    return fatal + frames
