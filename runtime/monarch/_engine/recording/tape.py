"""Numbers that a step computes in the program itself, such as the step count of AdamW, and from them arguments of ops.

While a step is recorded, such a number is a ``Number``: a float that notes what is done with it. The notes become a
Python function, which runs in each later call and returns the new numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_functions: Any = operator
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _functions.truediv,
    "//": _functions.floordiv,
    "%": operator.mod,
    "**": _functions.pow,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class OtherWayError(Exception):
    """A comparison of numbers came out differently than when the step was recorded."""


class Tape:
    """The notes of one recording. Used by the thread that records."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"OtherWayError": OtherWayError}
        self.changed: list[torch.Tensor] = []
        """Tensors of the program that the step changes in place."""
        self.compares = False
        self._count = 0

    def name(self, prefix: str) -> str:
        """Return a new name."""
        self._count += 1
        return f"{prefix}{self._count}"

    def bind(self, value: Any) -> str:
        """Return a name for an object."""
        for name, known in self.names.items():
            if known is value:
                return name
        name = self.name("c")
        self.names[name] = value
        return name

    def number(self, value: float, source: str) -> Number:
        """Return a number that comes from an expression."""
        name = self.name("n")
        self.lines.append(f"{name} = {source}")
        return Number(value, self, name)

    def text(self, value: Any) -> str:
        """Return an expression for a number."""
        return value.name if isinstance(value, Number) else repr(value)

    def function(self, results: list[str]) -> Callable[[Any], tuple[Any, ...]]:
        """Return the function of all notes; it takes the function that draws seeds."""
        saved = self.bind(self.changed)
        body = list(self.lines)
        if self.compares and self.changed:
            body = [f"old = [each.clone() for each in {saved}]", "try:", *[f"    {line}" for line in body]]
            body += ["except OtherWayError:", f"    for each, value in zip({saved}, old):", "        each.copy_(value)"]
            body += ["    raise"]
        body.append(f"return ({''.join(result + ', ' for result in results)})")
        code = "def numbers(seed):\n" + "\n".join(f"    {line}" for line in body)
        names = dict(self.names)
        exec(compile(code, "<numbers of a recorded step>", "exec"), names)
        return names["numbers"]


class Number(float):
    """A number that differs from call to call."""

    tape: Tape
    name: str

    def __new__(cls, value: float, tape: Tape, name: str) -> Number:
        made = super().__new__(cls, value)
        made.tape = tape
        made.name = name
        return made

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __neg__(self) -> Any:
        return self.tape.number(-float(self), f"-{self.name}")

    def __abs__(self) -> Any:
        return self.tape.number(abs(float(self)), f"abs({self.name})")

    def __bool__(self) -> bool:
        return bool(self != 0)

    __hash__ = float.__hash__


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Number) else value


def _binary(text: str, run: Callable[[Any, Any], Any], swapped: bool) -> Any:
    def compute(self: Number, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        tape = self.tape
        return tape.number(run(_plain(left), _plain(right)), f"{tape.text(left)} {text} {tape.text(right)}")

    return compute


def _comparison(text: str, run: Callable[[Any, Any], Any]) -> Any:
    def compare(self: Number, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        found = run(float(self), _plain(other))
        tape = self.tape
        tape.compares = True
        tape.lines.append(f"if ({self.name} {text} {tape.text(other)}) is not {found}: raise OtherWayError")
        return found

    return compare


_NAMES = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow"}
for _text, _run in _OPERATORS.items():
    setattr(Number, f"__{_NAMES[_text]}__", _binary(_text, _run, False))
    setattr(Number, f"__r{_NAMES[_text]}__", _binary(_text, _run, True))
for _text, _run in _COMPARISONS.items():
    setattr(Number, f"__{_run.__name__}__", _comparison(_text, _run))
