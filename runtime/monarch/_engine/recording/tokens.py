"""Numbers that differ from call to call, on their way through torch, which gives only a plain float to an op.

Each is replaced by a float that nobody would write, so that it is told from a constant with the same value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any

from monarch._engine.recording.tape import Number

_EXPONENT = -900
_RANGE = math.ldexp(1, -800)


class Tokens:
    """The tokens of one recording. Used by the thread that records."""

    def __init__(self) -> None:
        self._numbers: dict[float, Number] = {}
        self._used: set[float] = set()
        self._source = Random()

    def of(self, number: Number) -> float:
        """Return a new token."""
        token = math.ldexp(1 + self._source.random(), _EXPONENT)
        self._numbers[token] = number
        return token

    def find(self, value: Any) -> Number | None:
        """Return the number of a token that an op has got; None for any other value.

        Raises:
            ArithmeticError: torch has computed with a token.
        """
        if value.__class__ is not float or not 0 < abs(value) < _RANGE:
            return None
        found = self._numbers.get(value)
        if found is None:
            raise ArithmeticError
        self._used.add(value)
        return found

    def unseen(self, tokens: Iterable[float]) -> bool:
        """Return whether no op has got one of some tokens."""
        return any(each not in self._used for each in tokens)
