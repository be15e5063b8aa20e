"""The commands of a prompt, carried out on ranks; prompts differ only in what is around these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from monarch._core.kinds import is_tuple
from monarch._core.position import FAILED, PAUSED, PAUSING, Frame, Position
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._debug.collectives_in import collective_in
from monarch._debug.commands import RUN, STEPS, VALUE, WRONG, numbered, unknown
from monarch._debug.grouped import grouped_lines
from monarch._debug.here import where_here
from monarch._debug.pausing import DEAD, SILENT
from monarch._debug.resuming import resume_here
from monarch._debug.stepping import go_here
from monarch._node.current import current_node
from monarch._node.services.asking import ask_soon
from monarch._node.services.registry import ServiceRequest, declared, request
from monarch.exceptions import ArgumentError

PATIENCE = 1.5
"""Seconds for ranks to answer."""
_VALUE_S = 6.0
"""Seconds for them to evaluate an expression."""
_STEP_S = 1.0
"""Seconds for a step to end, after which a message says that it continues."""
_AROUND = 11
"""Lines that ``list`` shows."""
LOOKED_INTO = (PAUSED, PAUSING, FAILED)
"""States of ranks whose frames do not change."""
_RUNS_ON = "is still running; stops at the end of the step"
_ENDED = "ran to the end of the call"


@declared("evaluate.evaluate_here")
def evaluate_here(source: str, level: int) -> tuple[bool, str]:
    """Evaluate an expression where a rank is."""
    raise NotImplementedError


@declared("executing.execute_here")
def execute_here(source: str, level: int) -> tuple[bool, str]:
    """Run statements where a rank is."""
    raise NotImplementedError


@declared("source.lines_here")
def lines_here(level: int, whole: bool, around: int) -> tuple[str, int, int, list[str], list[str]] | str:
    """Return the source where a rank is."""
    raise NotImplementedError


@declared("looking.variables_at")
def variables_at(level: int, patterns: list[str]) -> tuple[Any, int, list[tuple[str, str, str, int, bool, str]]]:
    """Return the variables where a rank is."""
    raise NotImplementedError


class StopsLike(Protocol):
    """The stopped ranks of a program; see ``Stops``."""

    turns: dict[str, int]

    def positions(self) -> dict[str, Position]: ...
    def parked(self, uid: str) -> set[str]: ...
    def stepping(self, uid: str) -> set[str]: ...
    def held(self) -> set[str]: ...


class Answering:
    """Answers commands about ranks; used by the thread that asks.

    Args:
        stops: the stopped ranks.
    """

    def __init__(self, stops: StopsLike) -> None:
        self._stops = stops
        self._level = 0
        self._below = 0
        """The middle of the lines that ``list`` shows next; 0 for those around the current one."""

    # For a prompt to do in its own way

    @property
    def level(self) -> int:
        """The selected frame: 0 for the innermost one of the user's code, 1 for its caller."""
        return self._level

    @level.setter
    def level(self, level: int) -> None:
        self._level = level

    def placed(self, position: Position) -> Position:
        """Return a position with the names that the user knows."""
        return position

    def source_of(self, file: str) -> list[str]:
        """Return the lines of a file that ranks cannot read."""
        return []

    def until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not is_over() and time.monotonic() < end:
            time.sleep(0.01)

    # Commands

    def answer(self, procs: list[str], word: str, rest: str) -> str | None:
        """Carry out a command on ranks; return what to show, or None for an unknown one.

        Raises:
            ArgumentError: it is wrong, or would wait for other ranks.
        """
        below, self._below = self._below, 0
        if word in STEPS:
            return self.step(procs, word, int(rest or 0))
        if word in ("up", "down", "frame"):
            return self._move(procs, word, rest)
        match word:
            case "where":
                return grouped_lines((rank, self.stack(at)) for rank, at in positions(procs).items())
            case "continue":
                return self.go_on(procs)
            case "list" | "longlist":
                return self._list(procs, word == "longlist", int(rest) if rest.isdecimal() else 0 if rest else below)
            case "args":
                return self._arguments(procs)
            case "vars":
                return self._variables(procs, rest.split())
            case "whatis" | "print" if not rest:
                raise ArgumentError(f"{word}: expected an expression, as in {word} x")
            case "whatis":
                return self._value(procs, f"type({rest})")
            case "print":
                return self._value(procs, rest)
            case _:
                return self._python(procs, word, rest)

    def step(self, procs: list[str], how: str, line: int = 0) -> str:
        """Let paused ranks continue for a step, wait until it has ended, and describe where they are."""
        self.level = 0
        before = {proc: self._stops.turns.get(proc, 0) for proc in procs}
        answers = ask_soon(procs, request(go_here, how, line), PATIENCE)
        going = [proc for proc, answer in answers.items() if answer is True]
        if not going:
            raise ArgumentError(f"{how}: {_named(procs)} {_are(procs)} not paused, so {_they(procs)} cannot continue")

        def left() -> list[str]:
            return [proc for proc in going if self._stops.turns.get(proc, 0) == before[proc]]

        self.until(lambda: not left(), _STEP_S)
        unended, now = left(), self._stops.positions()
        texts = {proc: self.innermost(now[proc]) if proc in now else _ENDED for proc in going}
        texts |= dict.fromkeys(unended, _RUNS_ON)
        text = grouped_lines((split_proc(proc)[1], texts.get(proc, "not paused")) for proc in procs)
        parked = self._stops.parked(split_proc(procs[0])[0]) if unended else set[str]()
        return f"{text}\n{_named(parked)}: paused too; if the step needs them, enter 'continue'" if parked else text

    def go_on(self, procs: list[str]) -> str:
        """Let paused ranks continue, and describe which."""
        self.level = 0
        uid = split_proc(procs[0])[0]
        standing = {proc for proc in self._stops.positions() if split_proc(proc)[0] == uid}
        stepping = self._stops.stepping(uid)
        if standing.issubset(procs):
            # None is left that is to stop.
            procs = [*procs, *sorted(stepping.difference(procs))]
        before = {proc: self._stops.turns.get(proc, 0) for proc in procs if proc in standing | stepping}
        answers = ask_soon(procs, request(resume_here), PATIENCE)
        were = [proc for proc in procs if answers.get(proc) is True]
        other = [(split_proc(proc)[1], _not_resumed(answers.get(proc, SILENT))) for proc in procs if proc not in were]
        if not were and all(answers.get(proc) is False for proc in procs):
            raise ArgumentError(
                f"continue: {_named(procs)} {_are(procs)} not paused, so {_they(procs)} cannot continue"
            )
        # So that the next prompt is not for ranks that are about to continue.
        self.until(lambda: all(self._stops.turns.get(proc, 0) != turn for proc, turn in before.items()), _STEP_S)
        lines = [f"resumed {_named(were)}"] if were else []
        return "\n".join(lines + [grouped_lines(other)] * bool(other))

    def stack(self, position: Position) -> str:
        """Return a stack as text, with a mark at the selected frame if it is not the innermost one."""
        position = self.placed(position)
        lines = str(position).splitlines()
        if not 0 < self.level < len(position.frames):
            return "\n".join(lines)
        return "\n".join(
            [lines[0], *(f"{'>' if at == self.level else ' '} {line}" for at, line in enumerate(lines[1:]))]
        )

    def innermost(self, position: Position) -> str:
        """Describe the innermost line of a position."""
        return str(self.placed(position._replace(frames=position.frames[:1])))

    def ranks(self, chosen: list[str], procs: list[str]) -> str:
        """Describe all ranks of a mesh, and which are chosen."""
        shown = grouped_lines((rank, self.innermost(at)) for rank, at in positions(procs).items())
        return f"{_named(chosen)}: selected\n{shown}"

    def choose(self, procs: list[str]) -> tuple[list[str], str]:
        """Return the ranks of some that can be looked into, and why the others cannot."""
        found = {proc: at.state for proc, at in zip(procs, positions(procs).values(), strict=True)}
        good = [proc for proc in procs if found[proc] in LOOKED_INTO]
        bad = [(split_proc(proc)[1], f"{found[proc]}; only paused ranks can be selected") for proc in procs]
        return good, grouped_lines(each for each, proc in zip(bad, procs, strict=True) if proc not in good)

    def _move(self, procs: list[str], word: str, rest: str) -> str:
        """Select another frame, and describe it."""
        found = positions(procs)
        depth = max((len(each.frames) for each in found.values()), default=0)
        if not depth:
            raise ArgumentError(f"{word}: no code is running on {_named(procs)}")
        wanted = self.level + {"up": 1, "down": -1, "frame": 0}[word] * int(rest or 1)
        if word == "frame":
            wanted = int(rest) if rest else self.level
        if not 0 <= wanted < depth:
            if word == "frame":
                raise ArgumentError(f"expected a frame from 0 (innermost) to {depth - 1}, got {wanted}")
            # As far as it goes, as in pdb; but a step beyond the end is told.
            end = depth - 1 if word == "up" else 0
            if self.level == end:
                raise ArgumentError(f"this is the {'outermost' if word == 'up' else 'innermost'} frame")
            wanted = end
        self.level = wanted
        return grouped_lines((rank, self._frame(each)) for rank, each in found.items())

    def _frame(self, position: Position) -> str:
        if self.level >= len(position.frames):
            return f"no frame {self.level} here"
        return f"> {self.placed(position).frames[self.level]}"

    def _list(self, procs: list[str], whole: bool, around: int) -> str:
        answers = answers_of(procs, request(lines_here, self.level, whole, around))
        ends = [each[2] + len(each[3]) for each in answers.values() if is_tuple(each)]
        self._below = max(ends, default=0) + _AROUND // 2 if not whole else 0
        return grouped_lines((rank, self._source(each, whole, around)) for rank, each in answers.items())

    def _source(self, answer: Any, whole: bool, around: int) -> str:
        if not is_tuple(answer):
            return str(answer)
        file, line, first, lines, _ = answer
        # Of a cell that only the notebook has, the lines below are not those of the function alone.
        count = 100 if whole else (around or line) + _AROUND // 2 - first + 1
        lines = lines or [each.rstrip("\n") for each in self.source_of(file)[first - 1 : first - 1 + count]]
        name = self.placed(Position("", [Frame(file, line, "<module>", "")])).frames[0].file
        while lines and not lines[0].strip() and first < line:
            # The header of a cell.
            first, lines = first + 1, lines[1:]
        if not lines:
            return f"{name} has no more lines" if around else f"the source of {name} is not available"
        return f"{name}\n{numbered(line, first, lines)}"

    def _arguments(self, procs: list[str]) -> str:
        answers = answers_of(procs, request(lines_here, self.level, False, 0))
        by_rank = {split_proc(proc)[1]: proc for proc in procs}
        names = {rank: list(map(str, each[4])) for rank, each in answers.items() if is_tuple(each)}
        lines: dict[int, list[str]] = {rank: [] for rank in names}
        for name in dict.fromkeys(name for each in names.values() for name in each):
            having = [by_rank[rank] for rank, each in names.items() if name in each]
            for rank, text in self._values(having, name).items():
                lines[rank].append(f"{name} = {text}")
        texts = {rank: "\n".join(lines[rank]) or "no arguments" for rank in lines}
        return grouped_lines((rank, texts.get(rank, str(each))) for rank, each in answers.items())

    def _variables(self, procs: list[str], patterns: list[str]) -> str:
        answers = answers_of(procs, request(variables_at, self.level, patterns), _VALUE_S)
        return grouped_lines((rank, _variables_text(each)) for rank, each in answers.items())

    def _python(self, procs: list[str], word: str, rest: str) -> str | None:
        if word == WRONG:
            raise ArgumentError(unknown(rest))
        if word == RUN:
            _check(rest, word)
            answers = answers_of(procs, request(execute_here, rest, self.level), _VALUE_S)
            return grouped_lines((rank, _text(each)) for rank, each in answers.items() if _text(each))
        if word != VALUE:
            return None
        found = self._values(procs, rest)
        # A word that has no value may be a misspelt command.
        if rest.isidentifier() and all(each.startswith("NameError: ") for each in found.values()):
            raise ArgumentError(f"{rest!r} is neither a name nor a command here; help lists the commands")
        return grouped_lines(found.items())

    def _value(self, procs: list[str], source: str) -> str:
        return grouped_lines(self._values(procs, source).items())

    def _values(self, procs: list[str], source: str) -> dict[int, str]:
        _check(source, VALUE)
        answers = answers_of(procs, request(evaluate_here, source, self.level), _VALUE_S)
        return {rank: _text(each) for rank, each in answers.items()}


def _not_resumed(answer: object) -> str:
    return "not paused" if answer is False else str(answer)


def answers_of(procs: list[str], asked: ServiceRequest, patience: float = PATIENCE) -> dict[int, Any]:
    """Return the answer of each rank; for one that gives none, a text that says why."""
    node = current_node()
    answers = ask_soon([proc for proc in procs if node.peers.get(proc).dead is None], asked, patience)
    silent = {proc: SILENT if node.peers.get(proc).dead is None else DEAD for proc in procs}
    return {split_proc(proc)[1]: answers.get(proc, silent[proc]) for proc in procs}


def positions(procs: list[str]) -> dict[int, Position]:
    """Return where ranks are, paused or not; the state of one that gives no answer says why."""
    return {
        rank: Position.unpacked(each) if is_tuple(each) else Position(str(each), [])
        for rank, each in answers_of(procs, request(where_here)).items()
    }


def asked(procs: list[str], what: ServiceRequest, shown: Callable[[Any], str], patience: float = PATIENCE) -> str:
    """Return the answers of ranks as text, equal ones once."""
    answers = answers_of(procs, what, patience)
    return grouped_lines((rank, shown(each) if is_tuple(each) else str(each)) for rank, each in answers.items())


def _check(source: str, kind: str) -> None:
    try:
        name = collective_in(source, "exec" if kind == RUN else "eval")
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(f"{source!r} is not an expression: {getattr(error, 'msg', error)}") from None
    if name:
        raise ArgumentError(
            f"{name} would wait for other ranks, which are running other code; use local values instead"
        )


def _text(answer: Any) -> str:
    return str(answer[1]) if is_tuple(answer) else str(answer)


def _variables_text(answer: Any) -> str:
    if not is_tuple(answer) or answer[1] < 0:
        return _text((None, answer[0])) if is_tuple(answer) else str(answer)
    rows = [f"{name} = {text}" for name, _, text, *_ in answer[2]]
    left = answer[1] - len(rows)
    return "\n".join([*rows, *([f"and {left} more; vars w* shows those that begin with w"] if left else [])]) or "none"


def _named(procs: Iterable[str]) -> str:
    return describe_ranks(sorted(split_proc(each)[1] for each in procs))


def _are(procs: list[str]) -> str:
    return "is" if len(procs) == 1 else "are"


def _they(procs: list[str]) -> str:
    return "it" if len(procs) == 1 else "they"
