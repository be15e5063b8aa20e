"""Random generators of the program, such as ``random.Random`` and those of numpy: a step that draws from one is found.

A generator that the step has from its surroundings has another state afterwards. One that it makes without a seed is
found as it is made; with a seed it gives the same numbers in each call.
"""

from __future__ import annotations

import dis
import os
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from monarch._engine.issuing.lines import ProgramLine
from monarch._engine.recording.libraries import is_library_file
from monarch._python.frames import caller

_SOURCES = ("random.py", "secrets.py")
"""Files of the standard library that pass calls on."""


class Drawn(NamedTuple):
    """A generator and its state before a step.

    Attributes:
        generator: any.
        state: comparable.
        text: how the program would write it.
    """

    generator: Any
    state: Any
    text: str


def state_of_generator(value: Any) -> Any:
    """Return the state of a random generator; None for another value."""
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, numpy.BitGenerator):
        return pickle.dumps(value.state)
    return pickle.dumps(value.get_state(legacy=False)) if isinstance(value, numpy.RandomState) else None


def line_with(text: str, codes: Iterable[CodeType]) -> str:
    """Return the first line of some code that uses a name, as a traceback has it; "" if none does."""
    name = re.findall(r"[A-Za-z_]\w*", text.partition("[")[0])[-1:]
    for code in codes:
        number = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            place: Any = getattr(instruction, "positions", None)
            line = place.lineno if place is not None else instruction.starts_line
            # In Python 3.13 the latter tells only whether a line starts.
            number = line if type(line) is int else number
            if name and instruction.argval == name[0] and instruction.opname.startswith("LOAD"):
                return str(ProgramLine(code.co_filename, number, code.co_name))
    return ""


class Entropy:
    """Finds, in a block, generators that the calling thread makes without a seed, and draws from the system.

    Only those that the program asks for: libraries make names of temporary files and the like.

    Args:
        refuse: raises, for what is done and the line.
    """

    def __init__(self, refuse: Callable[[str, str], NoReturn]) -> None:
        self._refuse = refuse
        self._thread = 0
        self._before: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Begin the block."""
        self._thread = threading.get_ident()
        seeds = "it creates a random generator without a seed"
        self._watch(random.Random, "seed", seeds, lambda args: args[1:2] in ((), (None,)))
        for name in ("random", "getrandbits"):
            self._watch(random.SystemRandom, name, "it draws from the system's random generator")
        self._watch(os, "urandom", "it draws from the system's random generator")
        numpy: Any = sys.modules.get("numpy.random.bit_generator")
        if numpy is not None and hasattr(numpy, "randbits"):
            self._watch(numpy, "randbits", seeds)

    def stop(self) -> None:
        """End the block."""
        while self._before:
            holder, name, function = self._before.pop()
            setattr(holder, name, function)

    def _watch(self, holder: Any, name: str, what: str, matters: Callable[[Any], bool] = lambda args: True) -> None:
        function = getattr(holder, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread and matters(args):
                line = _line_of_program()
                if line is not None:
                    self._refuse(what, str(line))
            return function(*args, **kwargs)

        self._before.append((holder, name, function))
        setattr(holder, name, watched)


def _line_of_program() -> ProgramLine | None:
    """Return the line that called the caller, if it is the program's."""
    frame: FrameType | None = caller(2)
    while frame is not None and os.path.basename(frame.f_code.co_filename) in _SOURCES:
        frame = frame.f_back
    if frame is None or is_library_file(frame.f_code.co_filename):
        return None
    return ProgramLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
