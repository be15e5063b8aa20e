"""Calls that wait for a person, who is not at a rank: they raise an error that says what to do instead."""

from __future__ import annotations

import builtins
import os
import pdb
import sys
from typing import Any, NoReturn

from monarch._notebook.magics.nested import caller

_DEBUGGERS = {"bdb", "cmd", "pdb"}
_BREAK = (
    "{} cannot pause a rank, which has no terminal; print values there, or copy them to the notebook with "
    "%mesh pull NAME and debug there"
)


def refuse_input() -> None:
    """Make ``input``, ``breakpoint`` and ``pdb`` raise on this rank; debuggers with a connection of their own work."""
    builtins.input = _input
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _breakpoint
    for name in ("set_trace", "post_mortem", "pm"):
        setattr(pdb, name, _refuser(f"pdb.{name}()"))


def _input(prompt: object = "", /) -> NoReturn:
    if caller().f_globals.get("__name__") in _DEBUGGERS:
        raise RuntimeError(_BREAK.format("a debugger"))
    raise EOFError(
        "input() cannot ask on a rank, which has no terminal; ask in a notebook cell and send the value with "
        "%mesh push NAME"
    )


def _breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(_BREAK.format("breakpoint()"))


def _refuser(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(_BREAK.format(name))

    return refuse
