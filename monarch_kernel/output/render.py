"""How the results of a cell on several ranks are shown: equal ones once, the others side by side."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from monarch._kernel_api import CellError, describe_ranks

Bundle = dict[str, Any]
"""MIME type to data."""
_SHOWN = 64
"""Unequal values that are shown side by side at most; the text has all of them."""
_BOX = "border:1px solid #8884;border-radius:4px;padding:4px 8px;min-width:8em;max-width:100%;overflow-x:auto"
_TRACE = "margin:4px 1em"
_GRID = "display:flex;flex-wrap:wrap;gap:6px;align-items:flex-start"


def grouped(bundles: Sequence[tuple[int, Bundle]]) -> list[tuple[list[int], Bundle]]:
    """Ranks whose values show alike, with what they show."""
    groups: list[tuple[list[int], Bundle]] = []
    for rank, shown in bundles:
        for ranks, bundle in groups:
            if bundle == shown:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], shown))
    return groups


def bundle_of_ranks(bundles: Sequence[tuple[int, Bundle]], total: int) -> Bundle | None:
    """One MIME bundle of what some ranks show, equal things once; None if they show nothing.

    Args:
        bundles: of each of these ranks.
        total: how many the mesh has.
    """
    groups = grouped(bundles)
    if not groups:
        return None
    text = "\n".join(_labelled(f"[{describe_ranks(ranks)}]", bundle) for ranks, bundle in groups)
    if len(groups) == 1:
        label = _badge(html.escape(describe_ranks(groups[0][0], total)))
        return {"text/plain": text, "text/html": f"<div>{label} {_html(groups[0][1])}</div>"}
    cells = "".join(
        f"<div style='{_BOX}'>{_badge(html.escape(describe_ranks(ranks)))}<div>{_html(bundle)}</div></div>"
        for ranks, bundle in groups[:_SHOWN]
    )
    more = f"<div>… {len(groups) - _SHOWN} more</div>" if len(groups) > _SHOWN else ""
    return {"text/plain": text, "text/html": f"<div style='{_GRID}'>{cells}{more}</div>"}


def _badge(text: str) -> str:
    return (
        "<span style='font-size:85%;color:#fff;background:#5b6ea8;border-radius:3px;padding:0 5px'>" + text + "</span>"
    )


def _html(bundle: dict[str, Any]) -> str:
    if "text/html" in bundle:
        return str(bundle["text/html"])
    for mime in ("image/png", "image/jpeg"):
        if mime in bundle:
            return f"<img style='max-width:100%' src='data:{mime};base64,{bundle[mime]}'/>"
    if "image/svg+xml" in bundle:
        return str(bundle["image/svg+xml"])
    return f"<pre style='margin:0'>{html.escape(str(bundle.get('text/plain', '')))}</pre>"


def _labelled(label: str, bundle: dict[str, Any]) -> str:
    text = str(bundle.get("text/plain", ""))
    return f"{label} {text}" if "\n" not in text else f"{label}\n{text}"


class CellStopped(KeyboardInterrupt):
    """The cell was stopped on its ranks; what that took has been said."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


# It is what a front end expects of a cell that was stopped.
CellStopped.__name__ = CellStopped.__qualname__ = "KeyboardInterrupt"


class MeshCellError(Exception):
    """A ``%%mesh`` cell failed on some ranks.

    Attributes:
        errors: of each rank that failed.
        results: a ValueMesh of what the others returned.
    """

    def __init__(self, name: str, errors: dict[int, CellError], total: int, results: Any = None) -> None:
        self.errors = errors
        self.results = results
        self.folded = False
        """Whether the tracebacks are shown beside it, folded."""
        self.lines = error_lines(name, errors, total)
        super().__init__("\n".join(self.lines))

    def tracebacks(self) -> Bundle | None:
        """The whole traceback of each way in which ranks have failed, folded; None if there is none."""
        found: dict[str, list[int]] = {}
        for rank, error in sorted(self.errors.items()):
            if error.trace.startswith("Traceback"):
                found.setdefault(error.trace, []).append(rank)
        if not found:
            return None
        causes = {rank for rank, error in self.errors.items() if not _follows(error)}
        if causes:
            # What was freed because of the others says nothing more.
            found = {trace: ranks for trace, ranks in found.items() if causes & set(ranks)}
        named = [(describe_ranks(ranks), trace) for trace, ranks in list(found.items())[:_SHOWN]]
        pages = "".join(
            f"<details><summary>traceback of {name}</summary><pre style='{_TRACE}'>{html.escape(trace)}</pre></details>"
            for name, trace in named
        )
        return {"text/plain": "\n".join(f"[{name}] {trace}" for name, trace in named), "text/html": pages}

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the ranks' own frames, and none of the notebook's."""
        if self.folded:
            return [f"MeshCellError: {self.lines[0]}", *self.lines[1:]]
        rank = min(self.errors, key=lambda rank: (_follows(self.errors[rank]), rank))
        first = self.errors[rank]
        return [
            f"MeshCellError: {self.lines[0]}",
            *self.lines[1:],
            *([f"Traceback of rank {rank}:"] if first.trace.startswith("Traceback") else []),
            first.trace,
        ]


def _follows(error: CellError) -> bool:
    """Whether it only says what others have brought about."""
    return error.freed or error.cut_off


def error_lines(name: str, errors: dict[int, CellError], total: int) -> list[str]:
    """Which ranks failed how; those that failed alike in one line."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for rank, error in sorted(errors.items()):
        groups.setdefault((error.kind, error.text, error.line), []).append(rank)
    causes = [rank for rank, error in errors.items() if not _follows(error)] or list(errors)
    freed = {rank for rank, error in errors.items() if error.freed} - set(causes)
    lines = [f"{name} failed on {describe_ranks(causes, total)}"]
    if freed:
        lines[0] += f"; {describe_ranks(freed)} waited for {'it' if len(causes) == 1 else 'them'} in a collective"
    # What has caused the others comes first.
    order = sorted(groups.items(), key=lambda each: (_follows(errors[each[1][0]]), each[0][0] != "SupervisionError"))
    for (kind, text, line), ranks in order:
        where = f" at {name} line {line}" if line else ""
        said = text.strip().splitlines()
        first = f"{kind}: {said[0]}" if said else kind
        lines.append(f"  {describe_ranks(ranks)}: {first}{where}")
        source = errors[ranks[0]].source
        if source:
            lines.append(f"      {source}")
    return lines
