"""``breakpoint()`` in the code of a rank: it pauses there."""

from __future__ import annotations

import os
import sys
from typing import Any

from monarch._actors import running
from monarch._actors.pausing.failed import failed
from monarch._actors.pausing.gate import gate
from monarch._actors.pausing.tracing import BREAKPOINT, StopReason
from monarch._node.remote_errors import is_consequence
from monarch._procs.zygote import user_forks
from monarch._python.frames import caller


def take_breakpoints() -> None:
    """Pause at each ``breakpoint()`` from now on, unless the environment names another debugger; and keep errors."""
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = break_here
    explain = running.on_error

    def keep(error: BaseException) -> BaseException | None:
        failed.keep(error)
        explained = explain(error)
        if explained is not None and is_consequence(explained):
            failed.explain(error, explained)
        else:
            failed.stop(error)
        return explained

    running.on_error = keep


def break_here(*_: Any, **__: Any) -> None:
    """Pause in the line that calls this. Where nobody could resume it, say so and continue."""
    where = ""
    if user_forks.is_child:
        where = "in a process forked by the rank"
    elif gate.leads():
        where = "in a callback, which must not wait,"
    elif not gate.busy():
        where = "outside a cell or an endpoint"
    if where:
        print(f"breakpoint() {where} was skipped: ranks pause in cells and endpoints", file=sys.stderr)
        return
    gate.stop_at(caller(), StopReason(BREAKPOINT, "breakpoint"))
