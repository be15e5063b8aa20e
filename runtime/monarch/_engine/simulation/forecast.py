"""The figures of a simulation, for the person: a table, a picture, and a trace for Chrome or Perfetto."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch._core.text.advice import advice
from monarch._engine.issuing.lines import lines
from monarch._engine.simulation.devices import EFFICIENCY, LATENCY, LAUNCH, Device
from monarch._engine.simulation.meter import OpEvent

OWNERS = ("parameters", "gradients", "optimizer", "activations", "inputs", "collectives")
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#bab0ac", "#72b7b2")


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives from one line.

    Attributes:
        op: name of the collective.
        axis: the axis of the mesh.
        line: the line of the program.
        count: how many.
        bytes: that a rank contributes to them.
        seconds: estimated.
    """

    op: str
    axis: str
    line: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """Memory, collectives and time of one rank, the one with the largest shards.

    Attributes:
        device: the name of the simulated device.
        ranks: how many devices there are.
        peak: bytes in use at the peak.
        owners: bytes at the peak by owner: parameters, gradients, optimizer, activations, inputs and, on CPUs, buffers
            of collectives.
        fits: whether the peak is within the memory of the device.
        collectives: by op, axis and line.
        seconds: estimated, of the whole block.
        step_seconds: estimated, from the end of an optimizer's step to that of the next; None for less than two.
        flops: floating point operations.
        events: the ops of the rank.
    """

    device: Device
    ranks: int
    peak: int
    owners: dict[str, int]
    fits: bool
    collectives: tuple[CollectiveRow, ...]
    seconds: float
    step_seconds: float | None
    flops: int
    events: tuple[OpEvent, ...]

    @property
    def assumptions(self) -> str:
        """The assumptions of the estimate of time."""
        return (
            f"{self.device.name}: ops take the longer of compute and memory time at {EFFICIENCY:.0%} of the data sheet"
            f", at least {LAUNCH * 1e6:g} us; collectives are rings, take at least {LATENCY * 1e6:g} us, and do not "
            f"overlap with ops; memory has no fragmentation"
        )

    def bytes_along(self, axis: str) -> int:
        """Return the bytes that a rank contributes to collectives along an axis."""
        return sum(each.bytes for each in self.collectives if each.axis == axis)

    def __repr__(self) -> str:
        verdict = "fits in" if self.fits else "does not fit in"
        text = [
            f"peak memory of a rank: {_bytes(self.peak)}, {verdict} {_bytes(self.device.memory)} of {self.device.name} "
            f"({self.ranks} devices)"
        ]
        text += [f"  {owner:12} {_bytes(self.owners[owner]):>10}" for owner in OWNERS if owner in self.owners]
        what, seconds = ("step", self.step_seconds) if self.step_seconds is not None else ("block", self.seconds)
        text.append(f"estimated time of a {what}: {seconds * 1e3:.3g} ms")
        for row in self.collectives:
            text.append(
                f"  {row.op} along {row.axis}: {row.count} x, {_bytes(row.bytes)}, {row.seconds * 1e3:.3g} ms  "
                f"{row.line}"
            )
        text.append(f"assumptions: {self.assumptions}")
        return "\n".join(text)

    def as_html(self) -> str:
        """Return the picture and the table, as a notebook shows them."""
        return self._repr_html_()

    def _repr_html_(self) -> str:
        whole = max(self.peak, self.device.memory)
        bars, x = "", 0.0
        for owner, color in zip(OWNERS, _COLORS, strict=True):
            width = 600 * self.owners.get(owner, 0) / whole
            bars += (
                f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="22" fill="{color}"><title>{owner}</title></rect>'
            )
            x += width
        limit = 600 * self.device.memory / whole
        bars += f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="22" stroke="currentColor" stroke-width="2"/>'
        key = "".join(
            f'<span style="color:{color}">&#9632;</span> {owner} {_bytes(self.owners.get(owner, 0))} &nbsp; '
            for owner, color in zip(OWNERS, _COLORS, strict=True)
        )
        return (
            f'<svg width="604" height="24" role="img" aria-label="memory of a rank at its peak">{bars}</svg>'
            f"<div>{key}</div><pre>{html.escape(repr(self))}</pre>"
        )

    def chrome_trace(self, path: str | Path) -> Path:
        """Write a trace for chrome://tracing or Perfetto: ops, collectives, and memory over time.

        Args:
            path: the path of the file, such as ``"trace.json"``.
        """
        found: list[dict[str, Any]] = []
        for each in self.events:
            begin = each.begin * 1e6
            about = {"line": str(lines[each.line]), "bytes": each.size, "flops": each.flops}
            thread = f"collectives along {each.axis}" if each.axis is not None else "ops"
            found.append(
                {
                    "name": each.name,
                    "ph": "X",
                    "ts": begin,
                    "dur": each.seconds * 1e6,
                    "pid": 0,
                    "tid": thread,
                    "args": about,
                }
            )
            found.append({"name": "memory", "ph": "C", "ts": begin, "pid": 0, "args": {"bytes": each.memory}})
        target = Path(path)
        target.write_text(json.dumps({"traceEvents": found}))
        return target


def forecast_of(simulation: Any) -> Forecast:
    """Return the figures of a simulation."""
    meter, steps = simulation.meter, simulation.steps
    rows: dict[tuple[str, str, int], list[OpEvent]] = {}
    for each in meter.events:
        if each.axis is not None:
            rows.setdefault((each.name.split(".")[1], each.axis, each.line), []).append(each)
    collectives = [
        CollectiveRow(op, axis, _short(line), len(all_), sum(e.size for e in all_), sum(e.seconds for e in all_))
        for (op, axis, line), all_ in rows.items()
    ]
    collectives.sort(key=lambda row: row.bytes, reverse=True)
    step = None
    if len(steps) >= 2:
        step = sum(each.seconds for each in meter.events[steps[-2] : steps[-1]])
    return Forecast(
        simulation.device,
        simulation.hosts * simulation.gpus,
        meter.peak,
        meter.at_peak(),
        meter.peak <= simulation.device.memory,
        tuple(collectives),
        meter.now,
        step,
        sum(each.flops for each in meter.events),
        tuple(meter.events),
    )


def _short(number: int) -> str:
    if not number:
        return ""
    line = lines[number]
    # A notebook names its cells, whose files are temporary ones.
    place = advice().placed(f"{line.file}:{line.number}")
    return place.rsplit("/", 1)[-1]


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    raise AssertionError
