"""Lines as the front end numbers them: from the first line of a cell, its ``%%mesh`` included."""

from __future__ import annotations

from typing import Any

from monarch_kernel.kernel_like import kernel_of, request_of


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
    return head.count("\n") if text.endswith(body) and head.endswith("\n") else 0
