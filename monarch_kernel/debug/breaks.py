"""``%mesh break``, ``%mesh breaks`` and ``%mesh clear``: breakpoints of a mesh."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from monarch._kernel_api import (
    ServiceAnswers,
    advice,
    ask_ranks,
    break_here,
    current_node,
    describe_ranks,
    known_here,
    request,
    state_of,
)
from monarch_kernel.debug.front_end import FrontEnd, Packed
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.debug.spawned import procs_of, uids
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes

_CELL = re.compile(r"(?:cell\s*)?\[?(\d+)\]?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*")
_USAGE = "%mesh break: expected a place such as train.py:12, 3:5 (cell [3], line 5) or a function, got {!r}"


class Breakpoint(NamedTuple):
    """A breakpoint of a mesh."""

    number: int
    mesh: str
    kind: str
    """``line`` or ``function``."""
    where: str
    """``cell [3]``, a path, or a function."""
    line: int
    condition: str
    ranks: tuple[int, ...] | None
    """None for all, new ones included."""

    def text(self) -> str:
        """Describe it."""
        place = (
            f"{advice().placed(self.where)} line {self.line}" if self.kind == "line" else f"the start of {self.where}"
        )
        condition = f" if {self.condition}" if self.condition else ""
        return f"{self.number}: {place}{condition}" + (f" on {describe_ranks(self.ranks)}" if self.ranks else "")


class Breaks:
    """The breakpoints of a notebook, which outlive the ranks of a mesh.

    Args:
        meshes: the meshes of the notebook.
        pausing: the commands beside these, which find the ranks that are meant.
        source: returns the file name and the source of a cell by its number; both empty for an unknown number.
        front_end: the debugger of the front end, whose breakpoints ranks have besides these.
    """

    def __init__(
        self, meshes: NotebookMeshes, pausing: Pausing, source: Callable[[int], tuple[str, str]], front_end: FrontEnd
    ) -> None:
        self._meshes = meshes
        self._pausing = pausing
        self._source = source
        self._front_end = front_end
        self._sending = Lock()
        """Held while the breakpoints of ranks are collected and sent, so that each rank gets the newest ones last."""
        # Threads that run cells, in single operations.
        self._points: list[Breakpoint] = []
        self._last = 0
        self._told: dict[str, set[str]] = {}
        """By mesh, the processes that know its breakpoints."""

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the commands by name, but for ``break``."""
        return {"breaks": self.breaks, "clear": self.clear}

    def raw(self) -> dict[str, Callable[[str], None]]:
        """Return the command that takes its text as it is typed, since it ends in code."""
        return {"break": self.add}

    def add(self, text: str) -> None:
        """Add a breakpoint."""
        place, condition, on = split(text)
        if not place:
            raise Usage(_USAGE.format(text.strip()))
        mesh, ranks = self._pausing.named("break", [on] if on else [])
        if condition:
            try:
                compile(condition, "<condition>", "eval")
            except (SyntaxError, ValueError) as error:
                raise Usage(f"%mesh break: expected an expression after 'if', got {condition!r}: {error}") from None
        kind, where, line = self._parsed(place)
        chosen = tuple(ranks) if len(ranks) < len(mesh.procs) else None
        self._last += 1
        point = Breakpoint(self._last, mesh.name, kind, where, line, condition, chosen)
        self._points.append(point)
        self._send(mesh)
        asked = int(place.rpartition(":")[2]) if kind == "line" else 0
        moved = f"; line {asked} has no code" if asked != line else ""
        print(f"breakpoint {point.text()}{moved}{self._doubt(mesh, ranks[0], point, place)}")

    def _doubt(self, mesh: Mesh, rank: int, point: Breakpoint, place: str) -> str:
        """Return a note about code that is not known yet, whose name may be misspelt; empty for other code."""
        cell = _CELL.fullmatch(place.rpartition(":")[0].strip()) if point.kind == "line" else None
        if cell is not None:
            return "" if self._source(int(cell[1]))[1] else f"\nnote: cell [{cell[1]}] has not run on ranks yet"
        if point.kind == "line" and os.path.exists(point.where):
            return ""
        answers = ask_ranks(state_of(mesh.procs).procs, [rank], request(known_here, point.kind, point.where))
        if answers[rank] is not False:
            return ""
        what = "file" if point.kind == "line" else "function"
        return f"\nnote: rank {rank} has not loaded the {what} {point.where!r} yet"

    def breaks(self, words: list[str]) -> None:
        """List the breakpoints."""
        mesh = self._meshes.get(parse("breaks", words).name)
        print("\n".join(each.text() for each in self._of(mesh)) or f"mesh {mesh.name!r} has no breakpoints")

    def clear(self, words: list[str]) -> None:
        """Remove breakpoints."""
        numbers: list[int] = parse("clear", words).numbers
        known = {each.number for each in self._points}
        missing = [number for number in numbers if number not in known]
        if missing:
            raise Usage(f"%mesh clear: breakpoint {missing[0]} does not exist; %mesh breaks lists all")
        gone = [each for each in self._points if not numbers or each.number in numbers]
        self._points = [each for each in self._points if each not in gone]
        for name in dict.fromkeys(each.mesh for each in gone):
            if name in self._meshes.by_name:
                self._send(self._meshes.by_name[name])
        print("\n".join(f"cleared breakpoint {each.text()}" for each in gone) or "no breakpoints to clear")

    def bind(self, mesh: Mesh) -> None:
        """Tell new ranks of a mesh its breakpoints; quick if there are none."""
        if not self._front_end.active and not (self._points and self._of(mesh)):
            return
        if set(_procs(mesh)) - self._told.get(mesh.name, set()):
            self._send(mesh)

    def _of(self, mesh: Mesh) -> list[Breakpoint]:
        return [each for each in self._points if each.mesh == mesh.name]

    def send_all(self) -> None:
        """Tell the ranks of all meshes their breakpoints, also of those that no command knows; from any thread, without
        waiting for them."""
        named = list(self._meshes.by_name.values())
        for mesh in named:
            self._send(mesh)
        with self._sending:
            known = {state_of(mesh.procs).procs.uid for mesh in named}
            procs = [proc for uid in uids() if uid not in known for proc in procs_of(uid)]
            ServiceAnswers(current_node(), procs, request(break_here, list(self._front_end.points()))).close()

    def _send(self, mesh: Mesh) -> None:
        with self._sending:
            points, chosen = self._of(mesh), self._front_end.points()
            groups: dict[tuple[Packed, ...], list[str]] = {}
            for rank, proc in enumerate(_procs(mesh)):
                own = tuple(
                    (each.number, each.kind, each.where, each.line, each.condition, "", "")
                    for each in points
                    if each.ranks is None or rank in each.ranks
                )
                groups.setdefault((*own, *chosen), []).append(proc)
            for own, procs in groups.items():
                # A cell that is sent after this finds them there.
                ServiceAnswers(current_node(), procs, request(break_here, list(own))).close()
            self._told[mesh.name] = set(_procs(mesh))

    def _parsed(self, place: str) -> tuple[str, str, int]:
        where, colon, number = place.rpartition(":")
        if not colon:
            if not _FUNCTION.fullmatch(place):
                raise Usage(_USAGE.format(place))
            return "function", place, 0
        if not number.strip().isdecimal() or not where:
            raise Usage(_USAGE.format(place))
        line = int(number)
        cell = _CELL.fullmatch(where.strip())
        if cell is not None:
            name = f"cell [{cell[1]}]"
            file, text = self._source(int(cell[1]))
            return "line", file or name, self._moved(line, text, name)
        path = os.path.abspath(where) if os.path.exists(where) else where
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            text = ""
        return "line", path, self._moved(line, text, where)

    @staticmethod
    def _moved(line: int, source: str, where: str) -> int:
        """Return the first line with code at or after a line.

        Raises:
            Usage: no such line exists.
        """
        lines = code_lines(source)
        if not lines or line in lines:
            return line
        later = [each for each in lines if each > line]
        if not later:
            raise Usage(f"%mesh break: {where} has no code at or after line {line}")
        return min(later)


def _procs(mesh: Mesh) -> list[str]:
    procs = state_of(mesh.procs).procs
    return [procs.proc(rank) for rank in range(len(mesh.procs))]


def split(text: str) -> tuple[str, str, str]:
    """Split a line of ``%mesh break`` into its place, its condition and its ranks."""
    place, condition, on = text.strip(), "", ""
    found = re.fullmatch(r"(.*?)\s+on\s+(\w*\[[^\]]*\]|\w+(?:\s*\[[^\]]*\])?)", place)
    # Without brackets, ``on`` may be a word of the condition.
    if found is not None and (" if " not in found[2]):
        place, on = found[1], found[2]
    head, word, rest = place.partition(" if ")
    if word:
        place, condition = head, rest.strip()
    return place.strip(), condition, on


def code_lines(source: str) -> set[int]:
    """Return the lines of a source at which code can stop; empty if it cannot be compiled."""
    try:
        codes = [compile(source, "<source>", "exec", 0x2000, dont_inherit=True)]
    except (SyntaxError, ValueError):
        return set()
    lines: set[int] = set()
    while codes:
        code = codes.pop()
        lines.update(line for *_, line in code.co_lines() if line)
        codes += [each for each in code.co_consts if isinstance(each, type(code))]
    return lines
