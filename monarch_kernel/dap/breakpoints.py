"""The breakpoints of a front end, as ranks take them. Control thread only, but for ``packed``."""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch._kernel_api import hits_of
from monarch_kernel.dap.protocol import FIRST, Message
from monarch_kernel.dap.sources import Sources
from monarch_kernel.debug.front_end import Packed

_NO_CODE = "no code for ranks at or after this line"
FILTERS = {"raised": "raised", "uncaught": "uncaught", "userUnhandled": "uncaught"}
"""The exceptions that a front end may ask to stop at, and what they are on ranks."""


class WantedBreakpoint(NamedTuple):
    """A breakpoint in a line."""

    line: int
    condition: str
    hits: str
    message: str


class Breakpoints:
    """Those of one session.

    Args:
        sources: the names of cells.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        # Replaced as a whole, since threads of cells read them.
        self._lines: dict[str, list[WantedBreakpoint]] = {}
        self._functions: list[tuple[str, str, str]] = []
        self._filters: list[str] = []

    def set_lines(self, arguments: Message) -> list[Message]:
        """Take the breakpoints of a file; return the answer to the front end for each one in a cell on ranks."""
        path = str(arguments["source"].get("path", ""))
        wanted: list[Message] = arguments.get("breakpoints") or []
        on_ranks = self._sources.runs_on_ranks(path)
        answers: list[Message] = []
        taken: list[WantedBreakpoint] = []
        for number, each in enumerate(wanted):
            asked = int(each["line"])
            line = self._sources.moved(path, asked) if on_ranks else asked
            wrong = _NO_CODE if line is None else _wrong(each)
            answer = {"id": FIRST + number, "verified": not wrong, "line": line or asked, "source": {"path": path}}
            answers.append({**answer, "message": wrong} if wrong else answer)
            if line is not None and not wrong:
                rest = (each.get(name) or "" for name in ("condition", "hitCondition", "logMessage"))
                taken.append(WantedBreakpoint(line, *rest))
        lines = {file: some for file, some in self._lines.items() if file != path}
        self._lines = {**lines, path: taken} if taken else lines
        return answers

    def set_functions(self, arguments: Message) -> None:
        """Take the breakpoints at beginnings of functions."""
        wanted: list[Message] = arguments.get("breakpoints") or []
        self._functions = [
            (each["name"], each.get("condition") or "", each.get("hitCondition") or "")
            for each in wanted
            if not _wrong(each)
        ]

    def set_filters(self, arguments: Message) -> None:
        """Take the kinds of exceptions to stop at."""
        options: list[Message] = arguments.get("filterOptions") or []
        chosen: list[str] = [*(arguments.get("filters") or []), *(str(each["filterId"]) for each in options)]
        self._filters = sorted({FILTERS[each] for each in chosen if each in FILTERS})

    def clear(self) -> None:
        """Have none."""
        self._lines, self._functions, self._filters = {}, [], []

    def listed(self) -> dict[str, list[dict[str, Any]]]:
        """Return the lines of those in cells on ranks, by file, for a front end that opens the notebook."""
        return {
            path: [{"line": each.line} for each in some]
            for path, some in self._lines.items()
            if self._sources.runs_on_ranks(path)
        }

    def packed(self) -> tuple[Packed, ...]:
        """Return all as ranks take them; from any thread."""
        lines = [
            (0, "line", where, at, each.condition, each.hits, each.message)
            for path, some in self._lines.items()
            for each in some
            for where, at in self._sources.places(path, each.line)
        ]
        functions = [(0, "function", name, 0, condition, hits, "") for name, condition, hits in self._functions]
        # The last one: ranks tell of pauses too.
        return (*lines, *functions, *((0, kind, "", 0, "", "", "") for kind in (*self._filters, "watched")))

    def any(self) -> bool:
        """Return whether there are any in lines; from any thread."""
        return bool(self._lines)


def _wrong(wanted: Message) -> str:
    """Return what is wrong with the condition of a breakpoint; empty if nothing is."""
    condition = wanted.get("condition") or ""
    try:
        if condition:
            compile(condition, "<condition>", "eval")
        if wanted.get("hitCondition"):
            hits_of(wanted["hitCondition"])
    except SyntaxError as error:
        return f"{condition!r} is not an expression: {error.msg}"
    except ValueError as error:
        return str(error)
    return ""
