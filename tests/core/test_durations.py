"""Durations as people write them."""

from __future__ import annotations

import pytest

from monarch._core.text.durations import duration_text, parse_duration
from monarch.exceptions import ArgumentError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("30m", 1800), ("90s", 90), ("1h30m", 5400), ("1d", 86400), ("1.5h", 5400), (" 1D2h3m4s ", 93784)],
)
def test_valid_durations_parse(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "2", "h", "2 h", "-1h", "30m1h", "1h1h", "2w", "1h30", "0s", "400d", "1e9s", "٣s"]
)
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(ArgumentError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7200, "2h"), (5400, "1h 30m"), (90061, "1d 1h"), (0.4, "0s"), (-3, "0s"), (59.6, "1m")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
