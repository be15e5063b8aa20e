"""The lines of ``%mesh who``: one for the ranks on which a variable is the same, as far as it is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from monarch._kernel_api import Variable, format_ranks

_MOST = 6
"""Lines of one variable."""
_DEFINITIONS = ("class", "function", "module", "builtin_function_or_method")
"""Types whose contents are not compared, as nobody expects it."""
EQUAL, DIFFER, UNKNOWN = "equal", "differ", "not compared"


class WhoLine(NamedTuple):
    """A variable on some ranks; the name is empty for lines after its first."""

    name: str
    kind: str
    value: str
    size: str
    ranks: str
    contents: str


class _Group(NamedTuple):
    """A variable with its ranks."""

    variable: Variable
    ranks: list[int]

    @property
    def shown(self) -> tuple[str, str]:
        """The part that is on screen."""
        return self.variable.kind, self.variable.text


def lines_of(listings: Mapping[int, list[Variable]], most: int) -> list[WhoLine]:
    """Return the lines for the variables of ranks, by name.

    Args:
        listings: the variables of each rank.
        most: the most variables that are shown.
    """
    groups: dict[str, dict[tuple[str, str, str], _Group]] = {}
    for rank, variables in sorted(listings.items()):
        for each in variables:
            key = (each.kind, each.text, each.mark)
            groups.setdefault(each.name, {}).setdefault(key, _Group(each, [])).ranks.append(rank)
    lines: list[WhoLine] = []
    for name in sorted(groups)[:most]:
        lines += _lines(name, list(groups[name].values()))
    return lines


def _lines(name: str, groups: list[_Group]) -> list[WhoLine]:
    alike: dict[tuple[str, str], list[_Group]] = {}
    for group in groups:
        alike.setdefault(group.shown, []).append(group)
    lines: list[WhoLine] = []
    for same in alike.values():
        if len(same) > 1 and all(len(each.ranks) == 1 for each in same):
            # Lines that look the same would say no more.
            ranks = [rank for each in same for rank in each.ranks]
            lines.append(_line(name, same[0].variable, ranks, "all differ"))
        else:
            lines += [_line(name, each.variable, each.ranks, _contents(each, len(groups))) for each in same]
    return [line._replace(name=name if at == 0 else "") for at, line in enumerate(_cut(lines, groups))]


def _cut(lines: list[WhoLine], groups: list[_Group]) -> list[WhoLine]:
    if len(lines) <= _MOST:
        return lines
    shown = lines[: _MOST - 1]
    rest = [rank for group in groups[_MOST - 1 :] for rank in group.ranks]
    more = f"… {len(lines) - len(shown)} more values"
    return [*shown, WhoLine("", "", more, "", format_ranks(rest), DIFFER)]


def _line(name: str, variable: Variable, ranks: list[int], contents: str) -> WhoLine:
    size = f"{'' if variable.complete else '> '}{size_text(variable.size)}"
    return WhoLine(name, variable.kind, variable.text, size, format_ranks(ranks), contents)


def _contents(group: _Group, count: int) -> str:
    if count > 1:
        return DIFFER
    if len(group.ranks) == 1 or group.variable.kind in _DEFINITIONS:
        return ""
    return EQUAL if group.variable.mark else UNKNOWN


def size_text(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:,.1f} {unit}"
