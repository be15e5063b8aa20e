"""Results as tables in a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from harness import FLOOR, OURS, Measure
from rich.console import Console
from rich.table import Table

WIDE = 4
"""Figures side by side."""


def number(value: float) -> str:
    """Format with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _rows(measures: Sequence[Measure], systems: Sequence[str], spread: bool = False) -> list[list[str]]:
    """Return a line for each measure; with ``spread``, the quartiles beside each median."""
    rows: list[list[str]] = []
    for measure in measures:
        row = [measure.name, measure.unit]
        for system in systems:
            value, ratio = measure.value(system), measure.ratio(system, OURS)
            if value is None:
                row.append("-")
            else:
                between = measure.spread(system) if spread else None
                row.append(
                    number(value)
                    + (f" [{number(between[0])}-{number(between[1])}]" if between else "")
                    + (f" p99 {number(measure.p99[system])}" if system in measure.p99 else "")
                    + (f" x{number(ratio)}" if system != OURS and ratio is not None else "")
                )
        rows.append(row)
    return rows


def _words(measures: Sequence[Measure]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of measures with words beside their figures: a line for each system."""
    about = dict.fromkeys(key for measure in measures for words in measure.words.values() for key in words)
    rows: list[list[str]] = []
    for measure in measures:
        for system in systems_of([measure]):
            samples, words = measure.samples[system], measure.words.get(system, {})
            figures = [number(median(samples)), number(max(samples))] if samples else ["-", "-"]
            rows.append([measure.name, system, *figures, *(words.get(key, "-") for key in about)])
    return ["what", "system", "median", "most", *about], rows


def systems_of(measures: Sequence[Measure]) -> list[str]:
    """Return ours, the floor, and then the others."""
    found = dict.fromkeys(system for measure in measures for system in measure.samples)
    return sorted(found, key=lambda system: (system != OURS, system != FLOOR))


def _verdicts(measures: Sequence[Measure]) -> list[list[str]]:
    rows: list[list[str]] = []
    for measure in measures:
        if measure.target is None:
            continue
        against = measure.target.against
        reached = measure.ratio(OURS, against) if against else measure.value(OURS)
        text = "-" if reached is None else f"{number(reached)}x" if against else f"{number(reached)} {measure.unit}"
        holds = {True: "yes", False: "NO", None: "not measured"}[measure.holds()]
        rows.append([measure.name, measure.target.text, text, holds])
    return rows


def show(console: Console, measures: Sequence[Measure]) -> None:
    """Tables of one benchmark."""
    if any(measure.words for measure in measures):
        _show_words(console, measures)
    else:
        _show_figures(console, measures)
    notes = dict.fromkeys(note for measure in measures for note in measure.notes)
    for note in notes:
        console.print(f"  {note}", style="dim", highlight=False)
    load = max(measure.load for measure in measures)
    if load > 0.1:
        console.print(f"  {load:.0%} of the cores was busy with other work before it began", style="yellow")
    console.print()


def _show_figures(console: Console, measures: Sequence[Measure]) -> None:
    """One system a line with few figures, since a terminal is narrow."""
    systems = systems_of(measures)
    for start in range(0, len(measures), WIDE):
        part = measures[start : start + WIDE]
        table = Table(title_justify="left", title=part[0].benchmark if not start else None, header_style="bold")
        table.add_column("")
        for measure in part:
            table.add_column(f"{measure.name}, {measure.unit}", justify="right")
        columns = _rows(part, systems)
        for index, system in enumerate(systems):
            table.add_row(system, *(column[index + 2] for column in columns), style="bold" if system == OURS else "")
        console.print(table)


def _show_words(console: Console, measures: Sequence[Measure]) -> None:
    headers, rows = _words(measures)
    table = Table(title_justify="left", title=f"{measures[0].benchmark}, {measures[0].unit}", header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold", no_wrap=header == "system")
    for index, (what, *row) in enumerate(rows):
        again = index > 0 and rows[index - 1][0] == what
        table.add_row("" if again else what, *row, style="bold" if row[0] == OURS else "")
    console.print(table)


def show_verdicts(console: Console, measures: Sequence[Measure]) -> None:
    """Yield the targets, and whether they are met."""
    table = Table(title="targets", title_justify="left", header_style="bold")
    for header in ("what", "target", "reached", "holds"):
        table.add_column(header)
    for row in _verdicts(measures):
        table.add_row(*row, style={"NO": "red", "yes": "green"}.get(row[-1], "dim"))
    console.print(table)


def markdown(measures: Sequence[Measure], about: dict[str, Any]) -> str:
    """Return the report for a file."""
    lines = [f"# Benchmarks, {about['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key != "date"]
    lines += ["", "Medians [first to third quartile] over the rounds of runs in which the systems take turns. `x`"]
    lines += ["after a figure is its ratio to ours, as the median of the ratios round by round; of times, more than"]
    lines += ["1 is slower than ours. p99 is that of all figures of all rounds."]
    lines += ["", "## Targets", ""]
    lines += _markdown(["what", "target", "reached", "holds"], _verdicts(measures))
    for benchmark in dict.fromkeys(measure.benchmark for measure in measures):
        its = [measure for measure in measures if measure.benchmark == benchmark]
        systems = systems_of(its)
        lines += ["", f"## {benchmark}", ""]
        if any(measure.words for measure in its):
            lines += [f"In {its[0].unit}.", "", *_markdown(*_words(its))]
        else:
            lines += _markdown(["what", "unit", *systems], _rows(its, systems, spread=True))
        notes = dict.fromkeys(note for measure in its for note in measure.notes)
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _markdown(headers: list[str], rows: list[list[str]]) -> list[str]:
    head = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]


def as_json(measures: Sequence[Measure], about: dict[str, Any]) -> str:
    """Return everything, with the figure of each round."""
    found = [{**asdict(measure), "holds": measure.holds()} for measure in measures]
    return json.dumps({"about": about, "measures": found}, indent=1, default=str)


def load(text: str) -> tuple[list[Measure], dict[str, Any]]:
    """Read the output of ``as_json``."""
    from harness import Target

    data = json.loads(text)
    measures: list[Measure] = []
    for each in data["measures"]:
        each.pop("holds")
        target = each.pop("target")
        measures.append(Measure(**each, target=Target(**target) if target else None))
    return measures, data["about"]
