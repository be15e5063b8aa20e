"""Lines as the front end numbers them: from the first line of a cell, its ``%%mesh`` included."""

from __future__ import annotations

from typing import Any

from monarch._kernel_api import caller, outward
from monarch_kernel.compat import cell_number
from monarch_kernel.kernel_like import kernel_of, request_of

_FRAMES = 100
"""Frames between a magic and the line that runs it, at most."""


def typed(shell: Any) -> str:
    """Return the running cell, as typed; empty if it is not known."""
    kernel = kernel_of(shell)
    if kernel is None:
        history: list[str] = shell.history_manager.input_hist_raw
        return history[-1] if history else ""
    content: dict[str, Any] = request_of(kernel).get("content") or {}
    return str(content.get("code", ""))


def lines_above(shell: Any, code: str) -> int:
    """Return how many lines of the running cell are above its code; 0 for code that is not part of it."""
    text, body = typed(shell).rstrip("\n"), code.rstrip("\n")
    head = text.removesuffix(body) if body else ""
    if text.endswith(body) and head.endswith("\n"):
        return head.count("\n")
    # The code of a line magic is a part of its line.
    lines, number = text.split("\n"), _line_that_runs(shell)
    return number - 1 if "\n" not in body and 0 < number <= len(lines) and body.strip() in lines[number - 1] else 0


def _line_that_runs(shell: Any) -> int:
    """Return the line of the running cell that this thread runs; 0 if it runs none."""
    for frame in outward(caller(), _FRAMES):
        if cell_number(shell, frame.f_code.co_filename) == shell.displayhook.prompt_count:
            return frame.f_lineno
    return 0
