"""``get_ipython()`` on a rank: the magics and shell commands of cells, without IPython.

The name is in the namespace of cells only, so that libraries do not take a rank for a Jupyter front end.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from monarch._notebook.magics import cell_magics, line_magics
from monarch._notebook.magics.commands import run_command, shell_command
from monarch._notebook.magics.expand import expand
from monarch._notebook.magics.names import why_missing
from monarch._notebook.magics.nested import caller, names_of, this_cell
from monarch._notebook.magics.words import BadLine


class UsageError(Exception):
    """A magic that ranks lack, or that was called in a wrong way."""


class ShellLines(list[str]):
    """The output of a command, as lines.

    Attributes:
        n: the whole text.
        s: the lines, separated by spaces.
        l: the lines.
    """

    @property
    def n(self) -> str:
        """The whole text."""
        return "\n".join(self)

    nlstr = n

    @property
    def s(self) -> str:
        """The lines, separated by spaces."""
        return " ".join(self)

    spstr = s

    @property
    # The name that IPython gives it.
    def l(self) -> list[str]:  # noqa: E743
        """The lines."""
        return list(self)

    list = l


class RankShell:
    """The target of the calls that magics become.

    Attributes:
        config: empty, as of no front end.
    """

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}

    @property
    def user_ns(self) -> dict[str, Any]:
        """The namespace of cells."""
        return this_cell().variables

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run ``%magic_name line``."""
        self._check(magic_name, False)
        frame = caller(_stack_depth)
        expanded = line if magic_name in line_magics.VERBATIM else expand(line, _names(frame))
        return self._call(line_magics.run, magic_name, expanded, frame.f_lineno - 1)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run ``%%magic_name line`` with its body, which is Python or anything else."""
        self._check(magic_name, True)
        frame = caller()
        expanded = line if magic_name in line_magics.VERBATIM else expand(line, _names(frame))
        return self._call(cell_magics.run, magic_name, expanded, cell, frame.f_lineno)

    def system(self, cmd: str) -> None:
        """Run ``!cmd``: print its output as it arrives, and set ``_exit_code``."""
        self._call(line_magics.run, line_magics.SHELL, expand(cmd, _names(caller())), 0)

    def getoutput(self, cmd: str, split: bool = True) -> Any:
        """Return the output of ``x = !cmd``, as a list of lines."""
        shown: list[str] = []
        command = shell_command(expand(cmd, _names(caller())))
        self.user_ns["_exit_code"] = run_command(command, shown.append)
        text = "".join(shown)
        return ShellLines(text.splitlines()) if split else text

    def _check(self, name: str, cell: bool) -> None:
        missing = why_missing(name, cell)
        if missing:
            raise UsageError(missing)

    def _call(self, function: Any, name: str, *args: Any) -> Any:
        try:
            return function(name, *args)
        except BadLine as error:
            raise UsageError(str(error)) from None


_shell = RankShell()


def get_ipython() -> RankShell:
    """Return the shell of this rank."""
    return _shell


def offer(variables: dict[str, Any], needed: bool = False) -> None:
    """Put ``get_ipython`` into a namespace; a needed one replaces any other."""
    if needed or "get_ipython" not in variables:
        variables["get_ipython"] = get_ipython


def _names(frame: FrameType) -> dict[str, Any]:
    return {**names_of(this_cell()), **frame.f_globals, **frame.f_locals}
