"""The cell magics of ranks: captured and timed code, scripts, files."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

from monarch._notebook.magics.captured import capturing
from monarch._notebook.magics.commands import run_command
from monarch._notebook.magics.names import RICH
from monarch._notebook.magics.nested import run_nested, this_cell
from monarch._notebook.magics.profiling import profile_code
from monarch._notebook.magics.timing import time_code, time_loops
from monarch._notebook.magics.words import BadLine
from monarch._notebook.showing.display import current_display

_PYTHON: dict[str, str] = dict.fromkeys(("python", "python3"), sys.executable)
"""Programs of which a rank runs that of its own environment."""


def run(name: str, line: str, body: str, above: int) -> Any:
    """Run a cell magic.

    Args:
        name: without percent signs.
        line: the rest of its line.
        body: the lines below.
        above: how many lines of the cell are above the body.
    """
    try:
        if name == "capture":
            return _capture(line, body, above)
        if name == "time":
            return time_code(f"\n{body}" if not line else f"{line}\n{body}", above - 1)
        if name == "timeit":
            return time_loops(line, body)
        if name == "prun":
            return profile_code(line, above, body)
        if name in RICH:
            return current_display().publish({RICH[name]: body, "text/plain": body.rstrip("\n")})
        return _write(line, body) if name == "writefile" else _script(name, line, body)
    except BadLine as error:
        raise BadLine(f"%%{name}: {error}") from None


def _capture(line: str, body: str, above: int) -> None:
    parts, names = {"stdout", "stderr", "display"}, list[str]()
    for word in line.split():
        if word.startswith("--no-") and word[5:] in parts:
            parts.discard(word[5:])
        elif word.isidentifier():
            names.append(word)
        else:
            raise BadLine(f"expected a name, --no-stdout, --no-stderr or --no-display, got {word!r}")
    cell = this_cell()
    with capturing(cell.display, parts) as captured:
        if names:
            cell.variables[names[0]] = captured
        value = run_nested(body, above)
        if value is not None:
            cell.display(value)


def _script(name: str, line: str, body: str) -> None:
    words = shlex.split(line) if name == "script" else [_PYTHON.get(name, name), *shlex.split(line)]
    if not words:
        raise BadLine("%%script: expected a program, as in %%script python3")

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    sys.stdout.flush()
    status = run_command(words, write, body)
    this_cell().variables["_exit_code"] = status
    if status:
        raise subprocess.CalledProcessError(status, words)


def _write(line: str, body: str) -> None:
    words = shlex.split(line)
    append = bool(words) and words[0] in ("-a", "--append")
    if len(words) != 1 + append:
        raise BadLine(f"expected [-a] FILE, got {line!r}")
    with open(words[-1], "a" if append else "w", encoding="utf-8") as file:
        file.write(body)
    print(f"wrote {words[-1]}")
