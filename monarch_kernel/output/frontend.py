"""Abilities of the front end of a cell, as far as its requests tell."""

from __future__ import annotations

from typing import Any

from monarch_kernel.kernel_like import Kernel, own_kernel


def overwrites_displays(kernel: Kernel | None, parent: Any) -> bool:
    """Return whether the front end replaces a display by its update; a terminal can only overwrite its last line."""
    return kernel is not None and (has_cells(parent) or not _is_terminal(kernel, parent))


def shows_late_output(kernel: Kernel | None, parent: Any) -> bool:
    """Return whether output of a cell is shown after its end; a program that executes a notebook drops it."""
    return kernel is None or has_cells(parent) or _is_terminal(kernel, parent)


def is_terminal(kernel: Kernel | None, parent: Any) -> bool:
    """Return whether a cell shows its output like a terminal, where only the last line can be overwritten."""
    return kernel is not None and not has_cells(parent) and _is_terminal(kernel, parent)


def _is_terminal(kernel: Kernel | None, parent: Any) -> bool:
    """Return whether a request without a cell is of a terminal: a program that executes a notebook takes no input."""
    request: dict[str, Any] = parent or {}
    content: dict[str, Any] = request.get("content") or {}
    own = own_kernel(kernel)
    return bool((own is not None and own.serves_terminal) or content.get("allow_stdin"))


def has_cells(parent: Any) -> bool:
    """Return whether a request names its cell, as those of notebook editors do."""
    request: dict[str, Any] = parent or {}
    metadata: dict[str, Any] = request.get("metadata") or {}
    return bool(metadata.get("cellId"))
