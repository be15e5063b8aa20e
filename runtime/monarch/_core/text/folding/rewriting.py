"""Lines that carriage returns begin again, as on a terminal."""

from __future__ import annotations


def is_rewritten(line: str) -> bool:
    """Return whether a line was rewritten from its start, as a progress bar does, and not only wiped."""
    before, returned, _ = line.rstrip("\r").rpartition("\r")
    return bool(returned and before.rpartition("\r")[2].strip())


def is_wiped(line: str) -> bool:
    """Return whether a line was wiped before its last text was written."""
    before, returned, _ = line.rstrip("\r").rpartition("\r")
    return bool(returned and not before.rpartition("\r")[2].strip())


def overwritten(text: str) -> str:
    """Return what a terminal keeps of a line: the part after the last carriage return that is not at its end."""
    return text.rstrip("\r").rpartition("\r")[2] if "\r" in text else text
