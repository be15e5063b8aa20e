"""The last state of a mesh as HTML without scripts and as text: what a saved notebook shows."""

from __future__ import annotations

import html

from monarch._kernel_api import describe_ranks
from monarch_kernel.views.protocol import DISPLAY, RankRow, Snapshot
from monarch_kernel.views.sparklines import sparklines
from monarch_kernel.views.states import LOOKS
from monarch_kernel.views.summary import boxes, calls_text, counts_text, failures, title_text

_DETAILED = 256
"""Ranks of a mesh up to which each has a text of its own to hover."""
_MOST_REASONS = 8
_STYLE = """
.monarch-static{color-scheme:light;color:light-dark(#1f2933,#e6edf3);font-family:sans-serif;font-size:13px;\
line-height:1.4}
@media (prefers-color-scheme:dark){.monarch-static{color-scheme:dark}}
[data-jp-theme-light="false"] .monarch-static,body.vscode-dark .monarch-static,\
body.vscode-high-contrast .monarch-static{color-scheme:dark}
[data-jp-theme-light="true"] .monarch-static,body.vscode-light .monarch-static,\
body.vscode-high-contrast-light .monarch-static{color-scheme:light}
.monarch-static table{border-collapse:separate;border-spacing:2px;display:inline-table;margin:4px 12px 4px 0}
.monarch-static caption{caption-side:top;text-align:left;opacity:.75;white-space:nowrap}
.monarch-static td{width:1.6em;height:1.6em;padding:0;text-align:center;border-radius:3px}
.monarch-static div{margin:2px 0}
.jp-OutputArea-child:has(+.jp-OutputArea-child .monarch-static)>.jupyter-widgets:not(:has(*)){display:none}
"""
"""Of the picture. A page that names no theme has that of the browser.

VS Code gives its light theme of high contrast the classes of both, so the light rule follows. The last rule hides the
text that JupyterLab shows in the place of a widget whose kernel has ended.
"""


def bundle_of(shown: Snapshot, hint: str = "", name: str = "", live: str = "") -> dict[str, str]:
    """Return the state of a mesh as a MIME bundle.

    Args:
        shown: the state.
        hint: a line below it.
        name: its display id, by which a page finds it that was opened later.
        live: its CSS class, by which the live view above it hides it.
    """
    below = f"<div>{html.escape(hint)}</div>" if hint else ""
    return {
        "text/html": html_of(shown, name, live) + below,
        "text/plain": "\n".join(filter(None, [text_of(shown), hint])),
    }


def html_of(shown: Snapshot, name: str = "", live: str = "") -> str:
    """Return the state of a mesh as HTML, which names its display id and has a class of its own."""
    parts = [
        f"<div><b>{html.escape(title_text(shown.mesh))}</b></div>",
        f"<div>{html.escape(counts_text(shown))}</div>",
        _grid(shown),
        *(f"<div>{html.escape(line)}</div>" for line in [*calls_text(shown), *_reasons(shown)]),
        sparklines(shown.points),
    ]
    style = f"<style>{_STYLE}{_colours(shown)}</style>"
    named = f' {DISPLAY}="{html.escape(name)}"' if name else ""
    classes = " ".join(filter(None, ["monarch-static", live]))
    return f'<div class="{html.escape(classes)}"{named}>{style}{"".join(parts)}</div>'


def _colours(shown: Snapshot) -> str:
    """Return the rules for the states that occur."""
    rules: list[str] = []
    for state in sorted({row.state for row in shown.ranks}):
        look = LOOKS[state]
        pair = f"{look.light},{look.dark}"
        ink = f"{_ink(look.light)},{_ink(look.dark)}"
        rules.append(f".monarch-static td.mk-{state}{{background:light-dark({pair});color:light-dark({ink})}}\n")
    return "".join(rules)


def _ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#fff"


def _linear(share: float) -> float:
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def _grid(shown: Snapshot) -> str:
    titles = len(shown.ranks) <= _DETAILED
    tables: list[str] = []
    for host, rows in boxes(shown.mesh, shown.ranks):
        body = "".join(f"<tr>{''.join(_cell(row, titles) for row in line)}</tr>" for line in rows)
        tables.append(f"<table><caption>{html.escape(host)}</caption>{body}</table>")
    return f"<div>{''.join(tables)}</div>"


def _cell(row: RankRow, titled: bool) -> str:
    title = f' title="{html.escape(describe_rank(row))}"' if titled else ""
    return f'<td class="mk-{row.state}"{title}>{LOOKS[row.state].sign}</td>'


def describe_rank(row: RankRow) -> str:
    """Describe what a rank does, as in ``rank 3: running cell [2] line 5``."""
    # The place names the cell too.
    doing = row.place if row.place.startswith(row.call) else ", ".join(filter(None, [row.call, row.place]))
    parts = [f"{LOOKS[row.state].word} {doing}".strip(), row.collective, row.reason]
    return f"rank {row.rank}: {', '.join(filter(None, parts))}"


def _reasons(shown: Snapshot) -> list[str]:
    found = failures(shown.ranks)
    lines = [f"{describe_ranks(ranks)}: {reason}" for reason, ranks in list(found.items())[:_MOST_REASONS]]
    return [*lines, f"{len(found) - _MOST_REASONS} more reasons"] if len(found) > _MOST_REASONS else lines


def text_of(shown: Snapshot) -> str:
    """Return the state of a mesh as text: a sign for each rank, and one line that counts them."""
    lines = [title_text(shown.mesh)]
    grid = list(boxes(shown.mesh, shown.ranks))
    width = max((len(host) for host, _ in grid), default=0)
    for host, rows in grid:
        for number, row in enumerate(rows):
            signs = " ".join(LOOKS[each.state].sign for each in row)
            lines.append(f"  {'' if number else host:{width}}  {signs}")
    return "\n".join([*lines, counts_text(shown), *calls_text(shown), *_reasons(shown)])
