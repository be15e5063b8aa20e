"""Small charts of metrics as SVG: the mean of the ranks, and the range between them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from monarch_kernel.views.protocol import Points

_WIDTH = 160
_HEIGHT = 36
_MOST = 80
"""Points of a line."""
_CHARTS = 12


class _At(NamedTuple):
    """The values of the ranks at one step."""

    step: int
    low: float
    mean: float
    high: float


def sparklines(points: Sequence[Points]) -> str:
    """Return the charts of the metrics of a mesh as HTML."""
    names = list(dict.fromkeys(each.name for each in points))
    charts = [_chart(name, [each for each in points if each.name == name]) for name in names[:_CHARTS]]
    more = f"<div>{len(names) - _CHARTS} more metrics</div>" if len(names) > _CHARTS else ""
    return "".join(filter(None, charts)) + more


def _chart(name: str, points: list[Points]) -> str:
    line = _thinned(_steps(points))
    if not line:
        return ""
    last = line[-1]
    spread = f" ({last.low:.4g} to {last.high:.4g})" if last.low < last.high else ""
    text = html.escape(f"{name} {last.mean:.4g}{spread} at step {last.step}")
    return f"<div>{_drawn(line, text)} {text}</div>"


def _steps(points: list[Points]) -> list[_At]:
    """Return the values by step, without those that are not finite."""
    values: dict[int, list[float]] = {}
    for each in points:
        for step, value in zip(each.steps, each.values, strict=True):
            if value is not None:
                values.setdefault(step, []).append(value)
    return [_At(step, min(some), sum(some) / len(some), max(some)) for step, some in sorted(values.items())]


def _thinned(line: list[_At]) -> list[_At]:
    every = -(-len(line) // _MOST) or 1
    return [*line[:-1:every], *line[-1:]]


def _drawn(line: list[_At], text: str) -> str:
    low, high = min(each.low for each in line), max(each.high for each in line)
    first, last = line[0].step, line[-1].step

    def place(step: int, value: float) -> str:
        across = (step - first) / (last - first) if last > first else 1.0
        up = (value - low) / (high - low) if high > low else 0.5
        return f"{1 + across * (_WIDTH - 2):.1f},{_HEIGHT - 2 - up * (_HEIGHT - 4):.1f}"

    ring = [place(at.step, at.high) for at in line] + [place(at.step, at.low) for at in reversed(line)]
    mean = [place(at.step, at.mean) for at in line]
    return (
        f'<svg role="img" aria-label="{text}" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<polygon points="{" ".join(ring)}" fill="currentColor" opacity="0.2"/>'
        f'<polyline points="{" ".join(mean)}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
