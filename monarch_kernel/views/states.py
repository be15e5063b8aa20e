"""The look of each state of a rank: a word, a shape and a colour for light and dark pages.

The colours are told apart with any colour vision: they differ in lightness too, and each state has a shape of its own.
"""

from __future__ import annotations

from typing import NamedTuple


class StateStyle(NamedTuple):
    """How a state is shown."""

    word: str
    sign: str
    """One character of any common font."""
    light: str
    """Colour on a light page."""
    dark: str
    """Colour on a dark page."""


LOOKS: dict[str, StateStyle] = {
    "starting": StateStyle("starting", "◌", "#8c96a3", "#8c96a3"),
    "idle": StateStyle("idle", "○", "#c3ccd6", "#4a5563"),
    "running": StateStyle("running", "▶", "#1b7f5c", "#2fbf8f"),
    "collective": StateStyle("waiting in a collective", "◐", "#e0a100", "#f2c14e"),
    "blocked": StateStyle("in a C call", "■", "#7a5195", "#b78fd6"),
    "paused": StateStyle("paused", "‖", "#2f6fb5", "#64a8f0"),
    "unresponsive": StateStyle("unresponsive", "?", "#b5651d", "#e8965a"),
    "failed": StateStyle("dead", "✕", "#b3261e", "#ff6f61"),
    "restarted": StateStyle("restarted", "↻", "#3aa0a8", "#62c9d1"),
    "stopped": StateStyle("stopped", "–", "#9aa3ad", "#5b6570"),
}
"""By state."""
