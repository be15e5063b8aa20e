"""Values of a cell on several ranks: those with equal contents are shown once, the others side by side."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch._kernel_api import DIGEST, Digest, describe_difference, describe_ranks

Bundle = dict[str, Any]
"""MIME type to data."""
_SHOWN = 64
"""Most unequal values shown side by side; the text has all."""
_BOX = "border:1px solid #8884;border-radius:4px;padding:4px 8px;min-width:8em;max-width:100%;overflow-x:auto"
_GRID = "display:flex;flex-wrap:wrap;gap:6px;align-items:flex-start"
_NOTE = "font-size:85%;opacity:.8"
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_DEVICE = re.compile(r"\bon ([a-z]+):\d+")
_PICTURES = ("image/png", "image/jpeg", "image/svg+xml")


class Group(NamedTuple):
    """Ranks with one value, or with values that look the same and cannot be compared."""

    ranks: list[int]
    bundle: Bundle
    """Without its digest."""
    digest: Digest | None
    is_compared: bool
    """Whether the values are known to be equal."""

    def label(self, total: int = 0) -> str:
        """Return the ranks, and whether their values are only alike."""
        if self.is_compared or len(self.ranks) == 1:
            return describe_ranks(self.ranks, total)
        return f"{describe_ranks(self.ranks)}, not compared"


def grouped(bundles: Sequence[tuple[int, Bundle]]) -> list[Group]:
    """Group the ranks whose values are equal, or look the same where they cannot be compared."""
    groups: list[tuple[Any, Group]] = []
    for rank, bundle in bundles:
        digest = bundle.get(DIGEST)
        is_compared = DIGEST not in bundle or digest is not None
        shown = {mime: _common(data, is_compared) for mime, data in bundle.items() if mime != DIGEST}
        # Pages may have ids of their own; two equal values with the same text are equal.
        form = shown.get("text/plain") if isinstance(digest, Digest) else shown
        digest = digest if isinstance(digest, Digest) else None
        key = form, is_compared, digest.whole if digest is not None else ""
        for other, group in groups:
            if other == key:
                group.ranks.append(rank)
                group.bundle["text/plain"] = shown.get("text/plain", "")
                break
        else:
            own = {mime: data for mime, data in bundle.items() if mime != DIGEST}
            groups.append((key, Group([rank], own, digest, is_compared)))
    return [group for _, group in groups]


def _common(data: Any, is_compared: bool) -> Any:
    """Return what ranks with equal values show alike: the number of a device is each rank's own."""
    if not isinstance(data, str):
        return data
    return _DEVICE.sub(r"on \1", data) if is_compared else _ADDRESS.sub("at 0x…", data)


def bundles_of_ranks(bundles: Sequence[tuple[int, Bundle]], total: int) -> list[Bundle]:
    """Return the outputs that show the values of ranks, equal ones once: one, unless HTML cannot hold the values.

    Args:
        bundles: the bundles of each rank.
        total: number of ranks of the mesh.
    """
    groups = grouped(bundles)
    if not any(is_apart(group.bundle) for group in groups):
        return [_side_by_side(groups, total)] if groups else []
    found: list[Bundle] = []
    for group in groups:
        label = group.label(total if len(groups) == 1 else 0)
        found += [{"text/plain": f"[{label}]", "text/html": _badge(label)}, group.bundle]
    return found


def merged_bundle(bundles: Sequence[tuple[int, Bundle]], total: int) -> Bundle:
    """Return one output for the values of ranks, for a display that is updated; without values an empty one."""
    groups = grouped(bundles)
    if len(groups) == 1 and is_apart(groups[0].bundle):
        return groups[0].bundle
    return _side_by_side(groups, total) if groups else {"text/plain": ""}


def is_apart(bundle: Bundle) -> bool:
    """Return whether a front end must get the value by itself, since a page cannot hold it."""
    if any(mime.startswith("application/vnd.") for mime in bundle):
        return True
    return not bundle.keys() & {"text/html", *_PICTURES} and bool(bundle.keys() & {"text/latex", "text/markdown"})


def _side_by_side(groups: list[Group], total: int) -> Bundle:
    notes = [_note(group, groups[0]) for group in groups]
    text = "\n".join(_labelled(group, note) for group, note in zip(groups, notes, strict=True))
    if len(groups) == 1:
        return {
            "text/plain": text,
            "text/html": f"<div>{_badge(groups[0].label(total))}<div>{_html(groups[0].bundle)}</div></div>",
        }
    cells = "".join(
        f"<div style='{_BOX}'>{_badge(group.label())}<div>{_html(group.bundle)}</div>"
        + (f"<div style='{_NOTE}'>{html.escape(note)}</div>" if note else "")
        + "</div>"
        for group, note in list(zip(groups, notes, strict=True))[:_SHOWN]
    )
    more = f"<div>… {len(groups) - _SHOWN} more</div>" if len(groups) > _SHOWN else ""
    return {"text/plain": text, "text/html": f"<div style='{_GRID}'>{cells}{more}</div>"}


def _note(group: Group, first: Group) -> str:
    """Return how a value differs from the first one, where that is not to be seen."""
    if group is first or group.digest is None or first.digest is None:
        return ""
    where = describe_difference(first.digest, group.digest)
    other = describe_ranks(first.ranks)
    if where:
        return f"differs from {other} {where}"
    return f"prints the same as on {other}, but the contents differ" if group.bundle == first.bundle else ""


def _badge(label: str) -> str:
    style = "font-size:85%;color:#fff;background:#5b6ea8;border-radius:3px;padding:0 5px"
    return f"<span style='{style}'>{html.escape(label)}</span>"


def _html(bundle: Bundle) -> str:
    if "text/html" in bundle:
        return str(bundle["text/html"])
    for mime in ("image/png", "image/jpeg"):
        if mime in bundle:
            return f"<img style='max-width:100%' src='data:{mime};base64,{bundle[mime]}'/>"
    if "image/svg+xml" in bundle:
        return str(bundle["image/svg+xml"])
    return f"<pre style='margin:0'>{html.escape(str(bundle.get('text/plain', '')))}</pre>"


def _labelled(group: Group, note: str) -> str:
    label, text = f"[{group.label()}]", str(group.bundle.get("text/plain", ""))
    note = f" ({note})" if note else ""
    return f"{label} {text}{note}" if "\n" not in text else f"{label}{note}\n{text}"
