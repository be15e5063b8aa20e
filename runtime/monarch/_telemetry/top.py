"""A live view of a mesh in a terminal."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

from monarch._core.shapes.extent import axes_text
from monarch._core.telemetry.events import RankState
from monarch._core.telemetry.model import BarModel, MeshModel, RankModel
from monarch._core.text.durations import duration_text
from monarch._core.text.tables import rich_table
from monarch._meshes.inside import state_of
from monarch._meshes.mesh_like import ActorMeshLike, ProcMeshLike
from monarch._telemetry.collector import telemetry_of

SHOWN = 32
"""Ranks that the view shows; those that need attention come first."""
_ORDER = (RankState.FAILED, RankState.UNRESPONSIVE, RankState.BLOCKED, RankState.PAUSED)
"""States that need attention."""
_HEADERS = ("rank", "state", "for", "call", "place", "cpu", "memory", "gpu", "last value")


def top(mesh: ProcMeshLike | ActorMeshLike, seconds: float | None = None) -> None:
    """Show the ranks of a mesh in the terminal, live, until Ctrl-C or the end of the mesh.

    Args:
        mesh: a mesh of processes or actors, spawned by this program.
        seconds: how long at most; None without a limit.

    Raises:
        MonarchError: the mesh was spawned elsewhere.
    """
    from rich.live import Live

    log, changed = telemetry_of(mesh), Event()
    until = None if seconds is None else time.monotonic() + seconds
    end = log.subscribe(changed.set)
    try:
        with Live(picture(log.model()), refresh_per_second=10) as live:
            while not state_of(mesh).stopped and (until is None or time.monotonic() < until):
                # Durations grow although nothing changes.
                changed.wait(1.0 if until is None else min(1.0, max(0.0, until - time.monotonic())))
                changed.clear()
                live.update(picture(log.model()))
    except KeyboardInterrupt:
        pass
    finally:
        end()


def picture(model: MeshModel, now: float = 0.0, most: int = SHOWN) -> Any:
    """Return the view of a state, for rich.

    Args:
        model: the state.
        now: seconds since the epoch; 0 for now.
        most: ranks that it shows.
    """
    from rich.console import Group
    from rich.text import Text

    now = now or time.time()
    ranks = sorted(model.ranks, key=lambda rank: (rank.state not in _ORDER, rank.rank))
    rows = [_row(model, rank, now) for rank in sorted(ranks[:most], key=lambda rank: rank.rank)]
    left = len(ranks) - len(rows)
    more = [Text(f"… {left} more ranks")] if left > 0 else []
    bars = [Text(_bar_text(bar)) for bar in model.bars.values() if not bar.done.keys() <= bar.ended]
    return Group(rich_table(_HEADERS, rows, most + 1, title=_title(model)), *more, *bars)


def _title(model: MeshModel) -> str:
    counts = {state: sum(rank.state is state for rank in model.ranks) for state in RankState}
    axes = axes_text(dict(zip(model.labels, model.sizes, strict=False)))
    states = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    return f"{model.name} ({axes}): {states}" if axes else f"{model.name}: {states}"


def _row(model: MeshModel, rank: RankModel, now: float) -> list[object]:
    call = model.calls.get(rank.calls[0]) if rank.calls else None
    usage = rank.usage
    gpu = f"{usage.gpu_memory / 2**30:.1f} GiB" if usage.gpu_memory else ""
    return [
        rank.rank,
        rank.state.value,
        duration_text(max(0.0, now - rank.since)),
        call.title if call is not None else "",
        rank.reason or rank.place,
        f"{usage.cpu:.0%}" if usage.cpu else "",
        f"{usage.rss / 2**30:.1f} GiB" if usage.rss else "",
        gpu + (f" {usage.gpu_load:.0%}" if usage.gpu_load >= 0 else ""),
        _last_value(model, rank.rank),
    ]


def _last_value(model: MeshModel, rank: int) -> str:
    """Return the newest value that a rank has logged."""
    mine = [series for series in model.series.values() if series.rank == rank and series.values]
    newest = max(mine, key=lambda series: series.changed, default=None)
    return f"{newest.name} {newest.values[-1]:.4g}" if newest is not None else ""


def _bar_text(bar: BarModel) -> str:
    slowest = min(bar.done, key=lambda rank: bar.done[rank])
    fastest = max(bar.done, key=lambda rank: bar.done[rank])
    total = max(bar.total.values())
    of = f" of {total:g}" if total > 0 else ""
    text = f"{bar.bar or 'progress'}: {bar.done[slowest]:g}{of} {bar.unit}".rstrip()
    if bar.done[slowest] == bar.done[fastest]:
        return text
    return f"{text} (rank {slowest}), fastest {bar.done[fastest]:g} (rank {fastest})"
