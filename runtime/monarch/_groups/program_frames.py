"""The frames of a torchrun program in an error, without those of the code that ran it."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from monarch._groups.torchrun import run_script
from monarch._node.remote_errors import is_ours


class RaisingProgram(NamedTuple):
    """The program that raised an error."""

    file: str
    frames: TracebackType | None
    """Its frames; None for an error in its syntax, or its exit code."""


def program_of(error: BaseException) -> RaisingProgram | None:
    """Return the program that raised an error; None if no program did."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code is not run_script.__code__:
        tb = tb.tb_next
    if tb is None:
        return None
    path: str = tb.tb_frame.f_locals["script"].path
    while tb is not None and _runs_programs(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    if tb is not None:
        return RaisingProgram(tb.tb_frame.f_code.co_filename, tb)
    return RaisingProgram((isinstance(error, SyntaxError) and error.filename) or path, None)


def _runs_programs(file: str) -> bool:
    return is_ours(file) or file == "<frozen runpy>" or file.endswith("/runpy.py")
