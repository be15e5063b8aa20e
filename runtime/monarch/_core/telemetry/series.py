"""The series of a model: the values of metrics, thinned out evenly."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from math import isfinite

from monarch._core.telemetry.events import Metrics
from monarch._core.telemetry.model import MeshModel, Series

MOST_POINTS = 2000
"""Values that a series keeps."""
MOST_IN_ALL = 500_000
"""Values that the series of a mesh keep together, as long as each has at least ``LEAST_POINTS``."""
LEAST_POINTS = 64
MOST_SERIES = 20_480
"""Series of a mesh; beyond it, the oldest is dropped."""


def add_values(model: MeshModel, event: Metrics, number: int) -> None:
    """Add the values of an event."""
    key = event.name, event.rank
    series = model.series.get(key)
    if series is None:
        series = model.series[key] = Series(event.name, event.rank)
        if len(model.series) > MOST_SERIES:
            del model.series[next(iter(model.series))]
    most = max(LEAST_POINTS, min(MOST_POINTS, MOST_IN_ALL // len(model.series)))
    for step, value in zip(event.steps, event.values, strict=False):
        _add(series, step, value, most)
    series.changed = number


def _add(series: Series, step: int, value: float, most: int) -> None:
    if series.steps and step < series.steps[-1]:
        _go_back(series, step)
    if series.loose:
        series.steps.pop()
        series.values.pop()
    series.steps.append(step)
    series.values.append(value)
    series.loose = series.seen % series.stride != 0 and isfinite(value)
    series.seen += 1
    if len(series.steps) > most:
        _thin(series, most)


def _go_back(series: Series, step: int) -> None:
    """Drop the values from a step on: code runs again, from its beginning or from a checkpoint."""
    first = bisect_left(series.steps, step)
    del series.steps[first:], series.values[first:]
    series.seen, series.loose = first * series.stride, False
    if not first:
        series.stride = 1
    series.runs += 1


def _thin(series: Series, most: int) -> None:
    """Drop every second value, except the newest and, unless they are too many, those that are not finite."""
    last = len(series.values) - 1
    kept = [at for at, value in enumerate(series.values) if at % 2 == 0 or at == last or not isfinite(value)]
    if len(kept) > most * 3 // 4:
        kept = [at for at in range(last + 1) if at % 2 == 0 or at == last]
    series.loose = (series.loose or last % 2 == 1) and isfinite(series.values[last])
    series.steps = [series.steps[at] for at in kept]
    series.values = [series.values[at] for at in kept]
    series.stride *= 2


def copy_series(series: Series) -> Series:
    """Return a copy."""
    return replace(series, steps=list(series.steps), values=list(series.values))
