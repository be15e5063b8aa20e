"""Calls that wait for a person, who is not at a rank: a debugger pauses the rank, others raise an error."""

from __future__ import annotations

import builtins
import getpass
import pdb
from typing import Any, NoReturn

from monarch._actors.pausing.breaking import break_here
from monarch._notebook.magics.nested import caller

_DEBUGGERS = {"bdb", "cmd", "pdb"}
_BREAK = (
    "{} needs a terminal, and a rank has none; pause the rank with breakpoint(), or open a prompt on it with "
    "%mesh debug, also after an error"
)
_ASK = "{} needs a terminal, and a rank has none; ask in a notebook cell and send the value with %mesh push NAME"


def refuse_input() -> None:
    """Make ``input``, ``getpass.getpass`` and ``pdb.pm`` raise on this rank, and ``pdb.set_trace`` pause it.

    Debuggers with a connection of their own work.
    """
    builtins.input = _input
    getpass.getpass = _getpass
    pdb.set_trace = break_here
    for name in ("post_mortem", "pm"):
        setattr(pdb, name, _refuser(f"pdb.{name}()"))


def _input(prompt: object = "", /) -> NoReturn:
    if caller().f_globals.get("__name__") in _DEBUGGERS:
        raise RuntimeError(_BREAK.format("a debugger"))
    raise EOFError(_ASK.format("input()"))


def _getpass(prompt: str = "", stream: Any = None, **_: Any) -> NoReturn:
    raise EOFError(_ASK.format("getpass.getpass()"))


def _refuser(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(_BREAK.format(name))

    return refuse
