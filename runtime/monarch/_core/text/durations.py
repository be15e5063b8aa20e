"""Durations as people write them: ``2h``, ``90s``, ``1h30m``."""

from __future__ import annotations

import re

from monarch.exceptions import ArgumentError

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_WHOLE = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[dhms])+")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhms])")
_LONGEST = 366 * 86400.0


def parse_duration(text: str) -> float:
    """Parse a duration to seconds: numbers with units, largest first, as in ``1d``, ``1h30m`` or ``90s``.

    Raises:
        ArgumentError: it is not a duration, or is zero, or above a year.
    """
    written = text.strip().lower()
    parts = _PART.findall(written)
    units = [unit for _, unit in parts]
    if not _WHOLE.fullmatch(written) or units != [unit for unit in _UNITS if unit in units]:
        raise ArgumentError(
            f"invalid duration {text!r}; write numbers with units d, h, m, s, as in 2h, 30m, 90s or 1h30m"
        )
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= _LONGEST:
        raise ArgumentError(f"duration: expected more than 0s and at most 366d, got {text!r}")
    return seconds


def duration_text(seconds: float) -> str:
    """Format a duration with its two largest units: ``2h``, ``1h 30m``, ``12s``."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in _UNITS.items():
        number, left = divmod(left, int(size))
        if number:
            parts.append(f"{number}{unit}")
    return " ".join(parts[:2]) or "0s"
