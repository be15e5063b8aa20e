"""The errors of a cell on several ranks, and their messages: equal errors are shown once."""

from __future__ import annotations

import html
import linecache
from typing import Any

from monarch._kernel_api import CellError, advice, describe_ranks, with_source
from monarch_kernel.output.bundles import Bundle

_SHOWN = 64
"""Most different tracebacks shown."""
_PLACES = 3
"""Most different places that a stopped cell names."""
_TRACE = "margin:4px 1em"


class CellStopped(KeyboardInterrupt):
    """The cell was stopped on its ranks; the message that says how was shown before."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


# The name that front ends expect for a stopped cell.
CellStopped.__name__ = CellStopped.__qualname__ = "KeyboardInterrupt"


class MeshCellError(Exception):
    """A ``%%mesh`` cell failed on some ranks.

    Attributes:
        errors: the error of each failed rank.
        results: a ValueMesh of the results of the other ranks.
    """

    def __init__(self, name: str, errors: dict[int, CellError], total: int, results: Any = None) -> None:
        self.errors = errors
        self.results = results
        self.folded = False
        """Whether the tracebacks are shown separately, folded."""
        self.lines = error_lines(name, errors, total)
        super().__init__("\n".join(self.lines))

    def tracebacks(self) -> Bundle | None:
        """Return each different traceback in full, folded, or None."""
        ranks_of: dict[str, list[int]] = {}
        for rank, error in sorted(self.errors.items()):
            if error.trace.startswith("Traceback"):
                ranks_of.setdefault(error.trace, []).append(rank)
        causes = {rank for rank, error in self.errors.items() if not _follows(error)}
        if causes:
            # Ranks freed because of the others add no information.
            ranks_of = {trace: ranks for trace, ranks in ranks_of.items() if causes & set(ranks)}
        if not ranks_of:
            return None
        named = [(describe_ranks(ranks), _placed(trace)) for trace, ranks in list(ranks_of.items())[:_SHOWN]]
        pages = "".join(
            f"<details><summary>traceback of {name}</summary><pre style='{_TRACE}'>{html.escape(trace)}</pre></details>"
            for name, trace in named
        )
        return {"text/plain": "\n".join(f"[{name}] {trace}" for name, trace in named), "text/html": pages}

    def _render_traceback_(self) -> list[str]:
        """Return the lines for IPython: frames of the ranks, none of the notebook."""
        if self.folded:
            return [f"MeshCellError: {self.lines[0]}", *self.lines[1:]]
        rank = min(self.errors, key=lambda rank: (_follows(self.errors[rank]), rank))
        first = self.errors[rank]
        lines = [f"MeshCellError: {self.lines[0]}", *self.lines[1:]]
        if first.trace.strip() in ("", f"{first.kind}: {first.text}") and "\n" not in first.text:
            # Without frames, it has nothing that the line of the rank lacks.
            return lines
        heading = [f"Traceback of rank {rank}:"] if first.trace.startswith("Traceback") else []
        return [*lines, *heading, _placed(first.trace)]


def _placed(trace: str) -> str:
    """Return a traceback of a rank with the cells of functions that the notebook has copied there, and their lines."""
    return advice().placed("\n".join(with_source(trace)))


def timeout_text(name: str, seconds: float, errors: dict[int, CellError], left: dict[int, str]) -> str:
    """Describe where each rank was when the timeout of a cell ran out.

    Args:
        name: the name of the cell.
        seconds: its timeout.
        errors: the interrupts of ranks that were stopped.
        left: what ranks that still run are doing.
    """
    places = _places(name, errors)
    for rank, text in left.items():
        places.setdefault(text, []).append(rank)
    ranks = sorted(rank for group in places.values() for rank in group)
    where = f" on {describe_ranks(ranks)}" if ranks else ""
    lines = [f"  {describe_ranks(sorted(group))}: {text}" for text, group in places.items()]
    return "\n".join([f"{name} timed out after {seconds:g} s{where}, and was interrupted", *lines])


def stopped_lines(name: str, errors: dict[int, CellError]) -> list[str]:
    """Describe where a Stop has interrupted ranks; nothing if that is unknown, or differs too much.

    Args:
        name: the name of the cell.
        errors: the interrupts of ranks.
    """
    # The prompt has told of breakpoints.
    known = {
        rank: each for rank, each in sorted(errors.items()) if each.line and not each.source.startswith("breakpoint(")
    }
    places = _places(name, known)
    if len(places) > _PLACES:
        return []
    return [f"  {describe_ranks(ranks)} {place}" for place, ranks in places.items()]


def _places(name: str, errors: dict[int, CellError]) -> dict[str, list[int]]:
    """Return the ranks at each place in code, as in ``at cell [3] line 2: x += 1``."""
    places: dict[str, list[int]] = {}
    for rank, error in errors.items():
        source = f": {error.source}" if error.source else ""
        called = f", called at {error.called}" if error.called else ""
        where = f"at {_place(error.file or name, error.line)}{source}{called}" if error.line else "stopped"
        places.setdefault(where, []).append(rank)
    return places


def _follows(error: CellError) -> bool:
    """Return whether an error is only a consequence of others."""
    return error.freed or error.cut_off


def error_lines(name: str, errors: dict[int, CellError], total: int) -> list[str]:
    """Describe how each rank failed, with one line for ranks that failed alike."""
    groups: dict[tuple[str, str, str, int, str], list[int]] = {}
    for rank, error in sorted(errors.items()):
        groups.setdefault((error.kind, error.text, error.file, error.line, error.called), []).append(rank)
    causes = [rank for rank, error in errors.items() if not _follows(error)] or list(errors)
    freed = {rank for rank, error in errors.items() if error.freed} - set(causes)
    lines = [f"{name} failed on {describe_ranks(causes, total)}"]
    if freed:
        lines[0] += f"; {describe_ranks(freed)} waited for {'it' if len(causes) == 1 else 'them'} in a collective"
    # Causes come before consequences.
    order = sorted(groups.items(), key=lambda each: (_follows(errors[each[1][0]]), each[0][0] != "SupervisionError"))
    for (kind, text, _, line, _), ranks in order:
        error = errors[ranks[0]]
        message = text.strip().splitlines()
        first = f"{kind}: {message[0]}" if message else kind
        if len(message) > 1 and message[0].rstrip().endswith(":"):
            # Such as "Process 0 terminated with the following error:", with a traceback below.
            first = f"{first.rstrip()} {message[-1].strip()}"
        lines.append(f"  {describe_ranks(ranks)}: {first}")
        if line:
            source = error.source or linecache.getline(error.file, line).strip()
            lines.append(f"      {_place(error.file or name, line)}{': ' if source else ''}{source}")
        if error.called:
            lines.append(f"      called at {error.called}")
    # One hint may be for several groups of ranks.
    hints = dict.fromkeys(each.hint for _, each in sorted(errors.items()) if each.hint)
    return lines + [f"  {hint}" for hint in hints]


def _place(file: str, line: int) -> str:
    """Return a line of a cell or program; classes that the notebook has sent have the file of its code."""
    placed = advice().placed(known := f"{file}:{line}")
    return placed if placed != known else f"{file} line {line}"
