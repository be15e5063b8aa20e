"""Breakpoints of a rank: a line of a cell or file, the beginning of a function, or an error; and when they stop."""

from __future__ import annotations

import itertools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

LINE, FUNCTION, RAISED, UNCAUGHT, WATCHED = "line", "function", "raised", "uncaught", "watched"
Packed = tuple[int, str, str, int, str, str, str]
_HITS = re.compile(r"\s*(==|>=|<=|>|<|%)?\s*(\d+)\s*")
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
    "%": lambda count, wanted: wanted > 0 and count % wanted == 0,
}  # fmt: skip
_SLOT = re.compile(r"\{([^{}]+)\}")


class RankBreakpoint(NamedTuple):
    """A breakpoint."""

    number: int
    """As ``%mesh breaks`` shows it; 0 for one of a front end's debugger."""
    kind: str
    """LINE, FUNCTION, RAISED (where an error is raised), UNCAUGHT (where a call has failed), or WATCHED (none: the
    program that controls this rank wants to know of pauses too)."""
    where: str
    """``cell [3]``, a path or its end; or the name of a function, perhaps with those of its class and module."""
    line: int
    """0 for a function."""
    source: str
    """The condition; empty for none."""
    hits: str
    """Which times of reaching it count, such as ``>= 3`` or ``% 10``; a number alone is that time; empty for all."""
    message: str
    """Printed instead of stopping, with the values of expressions in braces; empty to stop."""
    condition: CodeType | None
    """The source, compiled."""
    counter: Iterator[int]
    """Counts the times; any thread takes the next one, in single operations."""

    def packed(self) -> Packed:
        """Return it as it came."""
        return self[0], self[1], self[2], self[3], self[4], self[5], self[6]

    def counts(self) -> bool:
        """Count that it is reached, with its condition met; return whether this time counts."""
        if not self.hits:
            return True
        comparison, wanted = hits_of(self.hits)
        return comparison(next(self.counter), wanted)

    def text(self, frame: FrameType) -> str:
        """Return its message with the values of expressions."""
        return _SLOT.sub(lambda found: _value(found[1], frame), self.message)


class RankBreakpoints:
    """The breakpoints of a process."""

    def __init__(self) -> None:
        # Written by any thread, as a whole.
        self.now: tuple[RankBreakpoint, ...] = ()
        """Those that a trace function looks for."""
        self.others: frozenset[str] = frozenset()
        """The kinds of the others."""

    def take(self, packed: Iterable[Packed]) -> None:
        """Replace the breakpoints; those that stay keep their hit counts.

        Raises:
            SyntaxError: a condition is not an expression.
            ValueError: the hit condition of one is invalid.
        """
        known = {each.packed(): each for each in self.now}
        found = [known.get(each) or _unpacked(each) for each in packed]
        self.others = frozenset(each.kind for each in found if each.kind in (UNCAUGHT, WATCHED))
        self.now = tuple(each for each in found if each.kind not in self.others)


def hits_of(text: str) -> tuple[Callable[[int, int], bool], int]:
    """Return the comparison and the number of the text of a hit condition.

    Raises:
        ValueError: it is not a hit condition.
    """
    found = _HITS.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a number of hits such as 3, >= 3 or % 10, got {text!r}")
    return _COMPARED[found[1] or "=="], int(found[2])


def _unpacked(packed: Packed) -> RankBreakpoint:
    if packed[5]:
        hits_of(packed[5])
    condition = compile(packed[4], "<condition>", "eval") if packed[4] else None
    return RankBreakpoint(*packed, condition, itertools.count(1))


def _value(source: str, frame: FrameType) -> str:
    try:
        value: Any = eval(source, frame.f_globals, frame.f_locals)
        return str(value)
    except KeyboardInterrupt:
        # Stop means the code too.
        raise
    except BaseException as error:
        return f"<{type(error).__name__}: {error}>"


def lines_of(points: Iterable[RankBreakpoint], code: CodeType) -> dict[int, tuple[RankBreakpoint, ...]]:
    """Return the breakpoints in lines of a function, by line."""
    wanted: dict[int, tuple[RankBreakpoint, ...]] = {}
    for each in points:
        if each.kind == LINE and _is_file(each.where, code.co_filename):
            wanted[each.line] = (*wanted.get(each.line, ()), each)
    return {line: wanted[line] for line in {line for *_, line in code.co_lines() if line in wanted}} if wanted else {}


def enters(point: RankBreakpoint, frame: FrameType) -> bool:
    """Return whether a breakpoint is at the beginning of the function of a frame."""
    if point.kind != FUNCTION:
        return False
    code = frame.f_code
    if point.where.rpartition(".")[2] != code.co_name:
        return False
    # Before Python 3.11, the name of the class is not known.
    qualified = getattr(code, "co_qualname", point.where)
    names = f"{frame.f_globals.get('__name__', '')}.{qualified.replace('.<locals>', '')}"
    return names == point.where or names.endswith(f".{point.where}")


def describe_error(point: RankBreakpoint, frame: FrameType) -> str:
    """Return a note that a condition raises; empty if it does not."""
    if point.condition is None:
        return ""
    try:
        eval(point.condition, frame.f_globals, frame.f_locals)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f", whose condition raises {type(error).__name__}: {error}"
    return f" if {point.source}"


def _is_file(wanted: str, name: str) -> bool:
    return name == wanted or (not wanted.startswith("cell [") and name.endswith(os.sep + wanted.lstrip("./")))
