"""The line magics of ranks: working directory, environment, variables, help, timing, shell commands."""

from __future__ import annotations

import builtins
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from monarch._core.kinds import class_of, is_tuple
from monarch._notebook.magics.commands import run_command, shell_command
from monarch._notebook.magics.installs import pip_line, run_pip
from monarch._notebook.magics.names import ALIASES, RICH
from monarch._notebook.magics.nested import this_cell
from monarch._notebook.magics.profiling import profile_code
from monarch._notebook.magics.timing import time_code, time_loops
from monarch._notebook.magics.words import BadLine
from monarch._notebook.names.user_names import user_names
from monarch._notebook.who.complete import inspect_name, value_of

VERBATIM = {"time", "timeit", "capture", "pinfo", "pinfo2", "prun", "psearch", *RICH}
"""Magics whose line is code, in which braces and dollars are not expanded."""
SHELL = "!"
"""The name of shell commands among the magics."""
_came_from: list[str] = []
"""Earlier working directories of this process; single operations by any thread."""


def run(name: str, line: str, above: int) -> Any:
    """Run a line magic.

    Args:
        name: without the percent sign.
        line: the rest of the line.
        above: how many lines of the cell are above it.
    """
    try:
        if name == SHELL or name in ALIASES:
            return _run_shell(f"{ALIASES.get(name, '')} {line}".strip())
        if name == "time":
            return time_code(line, above)
        if name == "prun":
            return _prun(line, above)
        return _MAGICS[name](line.strip())
    except BadLine as error:
        raise BadLine(f"{'' if name == SHELL else '%'}{name}: {error}") from None


def _run_shell(command: str) -> None:
    """Run a shell command; print its output as it arrives, and set ``_exit_code``."""
    pip = pip_line(command)
    if pip:
        # Several pips at once in one environment break it.
        return _pip(pip)
    if command.rstrip().endswith("&"):
        raise BadLine("background commands are not supported; use subprocess.Popen")
    sys.stdout.flush()
    this_cell().variables["_exit_code"] = run_command(shell_command(command), _print)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _sx(line: str) -> list[str]:
    shown: list[str] = []
    this_cell().variables["_exit_code"] = run_command(shell_command(line), shown.append)
    return "".join(shown).splitlines()


def _pip(line: str) -> None:
    this_cell().variables["_exit_code"] = run_pip(line, this_cell())


def _cd(line: str) -> None:
    words = [word for word in shlex.split(line) if word != "-q"]
    if len(words) > 1:
        raise BadLine(f"expected one folder, got {line!r}")
    here = os.getcwd()
    folder = words[0] if words else "~"
    if folder == "-" and not _came_from:
        raise BadLine("no earlier folder")
    target = os.path.expanduser(_came_from[-1] if folder == "-" else folder)
    try:
        os.chdir(target)
    except OSError as error:
        raise BadLine(f"{error.strerror}: {target!r}") from None
    _came_from.append(here)
    if "-q" not in line.split():
        print(os.getcwd())


def _env(line: str) -> Any:
    if not line:
        return dict(os.environ)
    if "=" not in line and len(line.split()) == 1:
        if line not in os.environ:
            raise BadLine(f"no variable {line} in the environment")
        return os.environ[line]
    return _set_env(line)


def _set_env(line: str) -> None:
    separator = "=" if "=" in line.split(maxsplit=1)[0] or line.partition("=")[0].strip().isidentifier() else " "
    name, _, value = (part.strip() for part in line.partition(separator))
    if not name or any(space in name for space in " \t"):
        raise BadLine(f"expected NAME=VALUE, got {line!r}")
    os.environ[name] = value
    print(f"env: {name}={value}")


def _matplotlib(line: str) -> None:
    backend = line.removeprefix("--list").strip()
    if backend not in ("", "inline", "agg"):
        raise BadLine(f"ranks show figures inline only, not with backend {backend}")
    import matplotlib

    # Figures that are open at the end of a cell are shown in the notebook.
    matplotlib.use("agg")


def _who(line: str) -> None:
    names = _who_ls(line)
    print("\t".join(names) if names else "no variables from cells on this rank")


def _who_ls(line: str) -> list[str]:
    variables, kinds = this_cell().variables, set(line.split())
    names = user_names(variables)
    return [name for name in names if not kinds or type(variables[name]).__name__ in kinds]


def _whos(line: str) -> None:
    names = _who_ls(line)
    if not names:
        return _who(line)
    variables = this_cell().variables
    rows = [(name, type(variables[name]).__name__, _brief(variables[name])) for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
                    for row in rows))  # fmt: skip
    return None


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if is_tuple(shape):
        return f"shape {tuple(shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        return f"<repr raised {type(error).__name__}>"
    return text if len(text) <= 60 else text[:59] + "…"


def _pinfo(line: str) -> None:
    found = inspect_name(line, this_cell().variables)
    print(found if found is not None else f"Object `{line}` not found.")


def _pinfo2(line: str) -> None:
    value, found = value_of(line, this_cell().variables)
    if not found:
        return _pinfo(line)
    try:
        source = inspect.getsource(value if callable(value) or inspect.ismodule(value) else class_of(value))
    except (OSError, TypeError):
        # C code, for example.
        return _pinfo(line)
    print(f"{line}\n\n{source}".rstrip())
    return None


def _prun(line: str, above: int) -> Any:
    return profile_code(line, above)


def _psearch(line: str) -> None:
    """Print the names that fit a pattern such as ``torch.*ones*``; those with an underscore only if it has one."""
    whole, _, pattern = line.rpartition(".")
    if whole:
        value, found = value_of(whole, this_cell().variables)
        if not found:
            raise BadLine(f"no object {whole!r}")
        names = dir(value)
    else:
        names = sorted({*this_cell().variables, *dir(builtins)})
    hidden = not pattern.startswith("_")
    found = [name for name in names if fnmatchcase(name, pattern) and not (hidden and name.startswith("_"))]
    print("\n".join(f"{whole}.{name}" if whole else name for name in found) or f"no name matches {line!r}")


def _timeit(line: str) -> Any:
    return time_loops(line)


_MAGICS: dict[str, Callable[[str], Any]] = {
    "cd": _cd,
    "env": _env,
    "matplotlib": _matplotlib,
    "pinfo": _pinfo,
    "pinfo2": _pinfo2,
    "pip": _pip,
    "psearch": _psearch,
    "pwd": lambda line: os.getcwd(),
    "set_env": _set_env,
    "sx": _sx,
    "system": _sx,
    "timeit": _timeit,
    "who": _who,
    "who_ls": _who_ls,
    "whos": _whos,
}
