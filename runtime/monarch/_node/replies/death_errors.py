"""The errors of calls to dead ranks, with the last lines that these wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch._core.causes import Cause, CellRef, NotReady, NotStarted, Orphaned, Stopped
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._core.text.advice import advice
from monarch._core.text.causes import describe, describe_all
from monarch._core.text.crash import crash_lines
from monarch._core.text.durations import duration_text
from monarch._node.remote_errors import is_ours
from monarch._wire.messages import Dead
from monarch.config import TAIL_LINES
from monarch.exceptions import DeviceMeshError, SpawnError, StoppedError, SupervisionError

_OLD = 2.0
"""Seconds before the end of a process from which on the age of its last lines is told."""
_MOST = 8
"""Different causes that an error describes."""


def died(
    label: str,
    mesh: str,
    lost: dict[int, Dead],
    base: Sequence[int],
    results: ValueMesh[Any] | None,
    names: Mapping[str, str],
) -> DeviceMeshError:
    """Return the error of a call with dead ranks: the ranks, causes, and last lines of stderr.

    Args:
        label: the label of the call.
        mesh: the name of the mesh.
        lost: the deaths, by rank in the addressed view.
        base: the rank in the mesh of each rank in the view, by which the text names it.
        results: the results of the others.
        names: the names of the meshes that were spawned from here, by uid.
    """
    total = len(base) if list(base) == list(range(len(base))) else None
    kinds: dict[tuple[Cause, CellRef | None], list[int]] = {}
    for rank, dead in lost.items():
        kinds.setdefault((_named(dead.cause, names), dead.at), []).append(rank)
    stopped = all(dead.expected for dead in lost.values())
    kind: type[DeviceMeshError] = StoppedError if stopped else SupervisionError
    if all(isinstance(dead.cause, (NotStarted, NotReady)) for dead in lost.values()):
        kind = SpawnError
    lines: list[str] = []
    for (cause, at), ranks in list(kinds.items())[:_MOST]:
        whose = describe_ranks([base[rank] for rank in ranks], total)
        procs = f"the process{'es' if len(ranks) > 1 else ''} of {whose} of {mesh}"
        if stopped:
            cause, at = Stopped(), None
        lines.append(f"{procs} {(describe_all if len(ranks) > 1 else describe)(cause, at)}")
        tail = last_lines(lost[ranks[0]])
        if tail and not stopped:
            lines.append(f"  last lines of stderr of rank {base[ranks[0]]}{age_of_lines(lost[ranks[0]])}:")
            lines.extend(f"    {line}" for line in tail)
    if len(kinds) > _MOST:
        others = [base[rank] for ranks in list(kinds.values())[_MOST:] for rank in ranks]
        lines.append(f"{describe_ranks(others)} also ended, for {len(kinds) - _MOST} other reasons")
    alive = sorted(base[rank] for rank in range(len(base)) if rank not in lost)
    lines[0] = f"{label} failed: {lines[0]}"
    # Ranks that were told to stop, and none that lives: the mesh was stopped.
    uid = split_proc(next(iter(lost.values())).proc)[0]
    if not alive and (kind is SpawnError or any(dead.expected for dead in lost.values())):
        todo = f"{advice().after_stop()} to continue"
    elif uid not in names:
        orphaned = any(isinstance(dead.cause, Orphaned) for dead in lost.values())
        todo = advice().after_deaths_elsewhere(mesh, alive, orphaned)
    else:
        todo = advice().after_deaths(uid, sorted(base[rank] for rank in lost), alive)
    when = min((dead.when for dead in lost.values() if dead.when), default=0.0)
    text = "\n".join([*lines, todo])
    return kind(text, mesh=mesh, ranks=tuple(sorted(lost)), results=results, when=when, advice=todo)


def _named(cause: Cause, names: Mapping[str, str]) -> Cause:
    """Return a cause that names the owner as the user knows it, if that is a rank of a mesh spawned from here."""
    if isinstance(cause, Orphaned):
        uid, rank = split_proc(cause.owner)
        owner = f"rank {rank} of {names[uid]}" if uid in names else cause.owner
        return Orphaned(owner, _named(cause.how, names))
    return cause


def age_of_lines(dead: Dead) -> str:
    """Describe how old the last stderr lines of a proc are; empty if they are from its end."""
    return f", written {duration_text(dead.quiet)} before its death" if dead.quiet >= _OLD else ""


def last_lines(dead: Dead) -> list[str]:
    """Return the last stderr lines of a proc, at most ``TAIL_LINES``; of a progress bar, its last state.

    Of a dump of faulthandler, the frames of the thread that crashed.

    Lines from before its last cell have nothing to do with its death.
    """
    count = TAIL_LINES()
    for stream, offset, data in dead.tails:
        if stream == "stderr":
            # A program that opens /dev/stderr itself has made the file shorter.
            old = max(0, dead.since - offset) if dead.since <= offset + len(data) else 0
            if not (data := data[old:]).strip():
                return []
            lines = data.decode(errors="replace").rstrip().split("\n")
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            crash = crash_lines(lines, lambda file: is_ours(file) or file.startswith("<frozen"))
            # A dump begins with what matters.
            return crash[:count] or (lines[-count:] if count else [])
    return []
