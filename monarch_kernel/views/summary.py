"""The ranks of a mesh in a few words, and their places in a grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from monarch._kernel_api import duration_text
from monarch_kernel.views.protocol import CallRow, MeshRow, RankRow, Snapshot
from monarch_kernel.views.states import LOOKS

_WIDE = 16
"""Ranks of the innermost axis up to which a row of the grid has them all."""
_WRAPPED = 32
"""Ranks in a row of a longer axis."""
_GROUPS = 6
"""Groups of ranks that the line tells apart."""


def counts_text(shown: Snapshot) -> str:
    """Return how many ranks are in which state, as in ``8 ranks: 6 running cell [3], 1 dead, 1 idle``."""
    groups = Counter(_doing(row) for row in shown.ranks)
    parts = [f"{count} {text}" for text, count in groups.most_common(_GROUPS)]
    left = sum(groups.values()) - sum(count for _, count in groups.most_common(_GROUPS))
    total = len(shown.ranks)
    parts += [f"{left} other"] if left else []
    return f"{total} rank{'s' if total != 1 else ''}: {', '.join(parts) or 'none'}"


def _doing(row: RankRow) -> str:
    word = LOOKS[row.state].word
    if not row.call or row.state in ("failed", "stopped"):
        return word
    return f"{word} {row.call}" if row.state == "running" else f"{word} ({row.call})"


def title_text(mesh: MeshRow) -> str:
    """Return the name and axes of a mesh, and whether it has ended."""
    sizes = ", ".join(f"{label}={size}" for label, size in zip(mesh.labels, mesh.sizes, strict=False))
    ended = f" (ended: {mesh.reason})" if mesh.ended else ""
    return f"mesh {mesh.name!r}: {sizes}{ended}"


def calls_text(shown: Snapshot) -> list[str]:
    """Return a line for each call that runs."""
    running = [call for call in shown.calls if not call.ended]
    return [_call_text(call, shown.now) for call in running[-_GROUPS:]]


def _call_text(call: CallRow, now: float) -> str:
    done = len(call.ranks) - len(call.left)
    seconds = duration_text(max(0.0, float(int(now - call.started))))
    return f"{call.title}: {done} of {len(call.ranks)} ranks finished, running for {seconds}"


def boxes(mesh: MeshRow, ranks: Sequence[RankRow]) -> Iterator[tuple[str, list[list[RankRow]]]]:
    """Yield each host with the rows of its ranks in the grid, along the innermost axis."""
    inner = mesh.sizes[-1] if mesh.sizes else len(ranks)
    width = inner if inner <= _WIDE else _WRAPPED
    start = 0
    for end in range(1, len(ranks) + 1):
        if end == len(ranks) or mesh.hosts[end] != mesh.hosts[start]:
            of_host = list(ranks[start:end])
            yield mesh.hosts[start], [of_host[at : at + width] for at in range(0, len(of_host), width)]
            start = end


def failures(ranks: Sequence[RankRow]) -> dict[str, list[int]]:
    """Return the ranks that are dead or silent, by the reason."""
    found: dict[str, list[int]] = {}
    for row in ranks:
        if row.reason and row.state in ("failed", "unresponsive"):
            found.setdefault(row.reason, []).append(row.rank)
    return found
