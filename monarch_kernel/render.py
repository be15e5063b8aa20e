"""How the results of a cell on several ranks are shown: equal ones once, the others side by side."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from monarch._cells.execute import CellError, CellResult
from monarch._core.ranks import describe_ranks


def grouped(results: Sequence[tuple[int, CellResult]]) -> list[tuple[list[int], dict[str, Any]]]:
    """Ranks whose values show alike, with what they show."""
    groups: list[tuple[list[int], dict[str, Any]]] = []
    for rank, result in results:
        if result.bundle is None:
            continue
        for ranks, bundle in groups:
            if bundle == result.bundle:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], result.bundle))
    return groups


def bundle_of_results(results: Sequence[tuple[int, CellResult]], total: int) -> dict[str, Any] | None:
    """One MIME bundle of what the ranks returned; None if they returned nothing."""
    groups = grouped(results)
    if not groups:
        return None
    text = "\n".join(_labelled(f"[{describe_ranks(ranks)}]", bundle) for ranks, bundle in groups)
    if len(groups) == 1 and len(groups[0][0]) == len(results):
        label = html.escape(describe_ranks(groups[0][0], total))
        return {"text/plain": text, "text/html": f"<div>{_badge(label)} {_html(groups[0][1])}</div>"}
    cells = "".join(
        f"<div style='border:1px solid #8884;border-radius:4px;padding:4px 8px;min-width:8em'>"
        f"{_badge(html.escape(describe_ranks(ranks)))}<div>{_html(bundle)}</div></div>"
        for ranks, bundle in groups[:64]
    )
    more = f"<div>… {len(groups) - 64} more</div>" if len(groups) > 64 else ""
    return {
        "text/plain": text,
        "text/html": f"<div style='display:flex;flex-wrap:wrap;gap:6px;align-items:flex-start'>{cells}{more}</div>",
    }


def tagged(rank: int, bundle: dict[str, Any]) -> dict[str, Any]:
    """A bundle that a rank displays, with the rank on it."""
    shown: dict[str, Any] = {
        "text/plain": _labelled(f"[rank {rank}]", bundle),
        "text/html": f"<div>{_badge(f'rank {rank}')}<div>{_html(bundle)}</div></div>",
    }
    return shown


def _badge(text: str) -> str:
    return (
        "<span style='font-size:85%;color:#fff;background:#5b6ea8;border-radius:3px;padding:0 5px'>" + text + "</span>"
    )


def _html(bundle: dict[str, Any]) -> str:
    if "text/html" in bundle:
        return str(bundle["text/html"])
    for mime in ("image/png", "image/jpeg"):
        if mime in bundle:
            return f"<img src='data:{mime};base64,{bundle[mime]}'/>"
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
        self.lines = error_lines(name, errors, total)
        super().__init__("\n".join(self.lines))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the ranks' own frames, and none of the notebook's."""
        first = self.errors[min(self.errors)]
        return [
            f"MeshCellError: {self.lines[0]}",
            *self.lines[1:],
            *([f"Traceback of rank {min(self.errors)}:"] if first.trace.startswith("Traceback") else []),
            first.trace,
        ]


def error_lines(name: str, errors: dict[int, CellError], total: int) -> list[str]:
    """Which ranks failed how; those that failed alike in one line."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for rank, error in sorted(errors.items()):
        groups.setdefault((error.kind, error.text, error.line), []).append(rank)
    lines = [f"{name} failed on {describe_ranks(errors, total)}"]
    for (kind, text, line), ranks in groups.items():
        where = f" at {name} line {line}" if line else ""
        said = text.strip().splitlines()
        first = f"{kind}: {said[0]}" if said else kind
        lines.append(f"  {describe_ranks(ranks)}: {first}{where}")
        source = errors[ranks[0]].source
        if source:
            lines.append(f"      {source}")
    return lines
