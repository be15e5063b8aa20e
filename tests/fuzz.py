"""Messages that make no sense, for tests: random bytes, broken real ones, and typed ones with senseless values."""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from monarch._wire import messages as m
from monarch._wire.pickling import dumps

KINDS = typing.get_args(m.AnyMessage)
NUMBERS = [0, 1, -1, 2, 7, 255, 1 << 20, 1 << 31, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63)]
TEXTS = ["", "@", "h", "h/x", "h/agent", "/", "h/../../x", "x" * 1000, "\0", "a:b", "os.getpid", "\U0001f600", "p.0"]
BODIES = [b"", b"\x00", b"\xc1", b"garbage", bytes(1000), dumps(((), {}))[0], dumps(1)[0], b"\xdd\xff\xff\xff\xff"]
"""The last one is the head of a list of 4,294,967,295 values."""


class Fuzz:
    """A source of senseless frames, the same for a seed.

    Args:
        seed: of the random numbers.
        procs: proc ids that messages may name as their sender or receiver, beside such as do not exist.
        without: kinds of messages that it does not make, such as those that rightly end their receiver.
    """

    def __init__(self, seed: int, procs: list[str], without: tuple[type, ...] = ()) -> None:
        self.random = random.Random(seed)
        self._procs = procs
        self._kinds = [kind for kind in KINDS if kind not in without]

    def frames(self) -> list[bytes]:
        """One message; most have one frame."""
        pick = self.random.random()
        if pick < 0.2:
            return [self._noise()]
        frame = m.encode(self.message())
        if pick < 0.4:
            frame = self._broken(frame)
        return [frame, *(self._noise() for _ in range(self.random.choice([0, 0, 0, 1, 3])))]

    def message(self) -> m.AnyMessage:
        """A message of a kind, with values of the right types and no sense."""
        kind = self.random.choice(self._kinds)
        hints = typing.get_type_hints(kind)
        return kind(**{name: self._value(hint) for name, hint in hints.items()})

    def noise(self, count: int) -> Iterator[bytes]:
        """Random bytes, so many times."""
        return (self._noise() for _ in range(count))

    def many(self, count: int) -> Iterator[list[bytes]]:
        """So many messages."""
        return (self.frames() for _ in range(count))

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.choice([1, 2, 10, 200, 5000]))

    def _broken(self, frame: bytes) -> bytes:
        if self.random.random() < 0.4:
            return frame[: self.random.randrange(len(frame))] or b"\xc1"
        data = bytearray(frame)
        for _ in range(self.random.choice([1, 1, 4])):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def _value(self, hint: Any) -> Any:
        choose, parts = self.random.choice, typing.get_args(hint)
        match typing.get_origin(hint) or hint:
            case types.UnionType | typing.Union:
                return self._value(choose(parts))
            case builtin if builtin is list:
                return [self._value(parts[0]) for _ in range(choose([0, 1, 2, 5]))]
            case builtin if builtin is dict:
                return {self._value(parts[0]): self._value(parts[1]) for _ in range(choose([0, 1, 3]))}
            case builtin if builtin is tuple:
                several = parts[:1] * choose([0, 1, 4]) if parts[-1] is Ellipsis else parts
                return tuple(self._value(part) for part in several)
        simple: dict[Any, list[Any]] = {
            int: NUMBERS, str: [*TEXTS, *self._procs], bytes: BODIES, bool: [True, False],
            float: [0.0, -1.0, 1e300, float("nan")], types.NoneType: [None], typing.Any: [None, 1, "x", b"x", []],
        }  # fmt: skip
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            fields = typing.get_type_hints(hint)
            return hint(**{name: self._value(field) for name, field in fields.items()})
        return choose(simple[hint])
