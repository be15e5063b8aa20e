"""The source of code that lies in no file of this process, for tracebacks."""

from __future__ import annotations

import linecache


def keep_source(name: str, source: str) -> list[str]:
    """Let tracebacks show the source of code under its name; return its lines.

    Args:
        name: what its code objects call the file.
        source: its text.
    """
    # The last line must end like those that linecache reads: tracebacks count its end when they place carets.
    text = source if source.endswith("\n") else f"{source}\n"
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    return lines
