"""Numbers of things, for people."""

from __future__ import annotations


def count_text(count: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 host`` or ``2 hosts``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
