"""Figures of matplotlib, if the program has imported it."""

from __future__ import annotations

import base64
import os
import sys
from typing import Any

_INLINE = ("module://matplotlib_inline", "module://ipykernel")


def picture_of(value: Any) -> str | None:
    """Return a figure as PNG in base64; None for other values."""
    figures = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, getattr(figures, "Figure", ())):
        return None
    import io

    data = io.BytesIO()
    value.savefig(data, format="png", bbox_inches="tight")
    return base64.b64encode(data.getvalue()).decode()


def open_figures() -> list[Any]:
    """Return the figures of pyplot that are open."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    return [] if pyplot is None else [pyplot.figure(number) for number in pyplot.get_fignums()]


def close_figures() -> None:
    """Close all figures of pyplot."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")


def leave_inline_backend() -> None:
    """Draw without the notebook's own backend, which needs the notebook's process."""
    if os.environ.get("MPLBACKEND", "").startswith(_INLINE):
        os.environ["MPLBACKEND"] = "agg"
