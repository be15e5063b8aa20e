"""Views of a part of a mesh: a slice as the result of a cell shows its own ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from monarch._kernel_api import ProcMesh, region_of, state_of
from monarch_kernel.grammar.ranks import slice_text
from monarch_kernel.views.protocol import BarRow, CallRow, Snapshot


def part_of(mesh: ProcMesh) -> list[int]:
    """Return the ranks of a slice, in order; nothing for a whole mesh."""
    region = region_of(mesh)
    return [] if region == state_of(mesh).procs.region() else sorted(region.base_ranks())


def narrowed(shown: Snapshot, ranks: Sequence[int], sizes: dict[str, int]) -> Snapshot:
    """Return what a view of some ranks shows of a mesh.

    Args:
        shown: the state of the mesh.
        ranks: the ranks of the view, in order; all if there are none.
        sizes: the axes of the part.
    """
    if not ranks:
        return shown
    members = set(ranks)
    rows = [row for row in shown.ranks if row.rank in members]
    mesh = replace(
        shown.mesh,
        name=f"{shown.mesh.name}[{slice_text(ranks)}]",
        labels=[*sizes],
        sizes=[*sizes.values()],
        hosts=[shown.mesh.hosts[row.rank] for row in rows],
    )
    calls = [_narrowed(call, members) for call in shown.calls if members.intersection(call.ranks)]
    # A call that all of them have answered is over for these ranks.
    calls = [call for call in calls if call.ended or call.left]
    spans = [span for span in shown.spans if span.rank in members]
    points = [each for each in shown.points if each.rank in members or each.rank < 0]
    bars = [bar for row in shown.bars if (bar := _narrowed_bar(row, members, shown.now)) is not None]
    return replace(shown, mesh=mesh, ranks=rows, calls=calls, spans=spans, points=points, bars=bars)


def _narrowed(call: CallRow, members: Collection[int]) -> CallRow:
    return replace(
        call,
        ranks=[rank for rank in call.ranks if rank in members],
        left=[rank for rank in call.left if rank in members],
        errors={rank: text for rank, text in call.errors.items() if int(rank) in members},
        stopped=[rank for rank in call.stopped if rank in members],
    )


def _narrowed_bar(bar: BarRow, members: Collection[int], now: float) -> BarRow | None:
    """Return the bar of some ranks; None if none of them takes part."""
    places = [at for at, rank in enumerate(bar.ranks) if rank in members]
    if bar.together:
        return bar if places or not bar.ranks else None
    if not places:
        return None
    left = [rank for rank in bar.left if rank in members]
    return replace(
        bar,
        ranks=[bar.ranks[at] for at in places],
        done=[bar.done[at] for at in places],
        total=bar.total if len(bar.total) == 1 else [bar.total[at] for at in places],
        left=left,
        # Others may continue.
        ended=bar.ended or (0.0 if left else now),
    )
