"""The names of the magics of ranks; the notebook refuses others before a cell runs."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

ALIASES = {name: name for name in ("ls", "cat", "cp", "mv", "rm", "mkdir", "rmdir")} | {"ll": "ls -l"}
"""Line magics that are shell commands."""
LINE = frozenset(
    {"cd", "env", "matplotlib", "pinfo", "pinfo2", "pip", "prun", "psearch", "pwd", "set_env", "sx", "system"}
    | {"time", "timeit"}
    | {"who", "who_ls", "whos"}
    | ALIASES.keys()
)
PYTHON_CELLS = frozenset({"capture", "prun", "time", "timeit"})
"""Cell magics whose body is Python."""
RICH = {
    **{name: "text/html" for name in ("html", "HTML")},
    **{name: "image/svg+xml" for name in ("svg", "SVG")},
    "latex": "text/latex",
    "markdown": "text/markdown",
}
"""Cell magics that show their body, with its MIME type."""
PROGRAMS = frozenset({"bash", "perl", "python", "python3", "ruby", "script", "sh"})
"""Cell magics whose body is the input of a program."""
CELL = PYTHON_CELLS | PROGRAMS | RICH.keys() | {"writefile"}
_INSTEAD = {
    "autoreload": "use %mesh reload to reload an edited module on all ranks",
    "load_ext": "extensions work in notebook cells only; instead of autoreload, use %mesh reload MODULE",
    "pdb": "pause ranks with breakpoint(); after an error, run %mesh debug in a notebook cell",
    "javascript": "use it in a cell of the notebook",
    "js": "use it in a cell of the notebook",
    "debug": "after an error, run %mesh debug in a notebook cell",
    "run": "%mesh run FILE runs a script on the ranks",
}
"""Advice, by the name of a magic that ranks lack."""


def why_missing(name: str, cell: bool = False) -> str:
    """Return why a rank does not run a magic, and what to do; empty if it does.

    Args:
        name: the name of the magic, without percent signs.
        cell: whether it is a cell magic.
    """
    sign, known = ("%%", CELL) if cell else ("%", LINE)
    if name in known:
        return ""
    if name == "mesh":
        return f"{sign}mesh runs in the notebook, not on ranks; put it in a cell of its own"
    text = f"{sign}{name} is not available on ranks"
    instead = _INSTEAD.get(name) or _closest(sign, name, known)
    return f"{text}; {instead}" if instead else text


def _closest(sign: str, name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, sorted(known), 1)
    return f"did you mean {sign}{close[0]}?" if close else ""
