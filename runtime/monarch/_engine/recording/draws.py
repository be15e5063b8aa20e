"""Random numbers in a recorded step: seeds of ops, drawn in each call; other uses of generators are found."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from monarch._engine.issuing.seeds import new_seed
from monarch._engine.recording.captured import CapturedValues
from monarch._engine.recording.generators import line_with, state_of_generator
from monarch._engine.recording.tape import Tape


class Draws:
    """The seeds of one recording. Made before the step runs, in the thread that records.

    Args:
        tape: for notes.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.names: dict[int, str] = {}
        """Names on the tape by seed. A seed that is drawn twice, for example by gradient checkpointing, has one."""
        self._before = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def draw(self) -> int:
        """Return a seed."""
        seed = new_seed()
        if seed not in self.names:
            self.names[seed] = name = self._tape.name("n")
            self._tape.lines.append(f"{name} = seed()")
        return seed

    def other_use(self, captured: CapturedValues) -> str | None:
        """Return what else has used a generator of the program, and where: later calls would not repeat it.

        Args:
            captured: what the step has used, as it was before.
        """
        for generator, state, text in captured.generators:
            if state_of_generator(generator) != state:
                return _at(f"it draws from the random generator {text!r}", text, captured)
        if random.getstate() != self._python:
            return _at("it draws from Python's random module", "random", captured)
        if _numpy_state() != self._numpy:
            return _at("it draws from numpy's random generator", "random", captured)
        after = torch.default_generator.get_state()
        torch.default_generator.set_state(self._before)
        for _ in self.names:
            new_seed()
        found = torch.default_generator.get_state()
        torch.default_generator.set_state(after)
        return None if torch.equal(found, after) else "it seeds the program's random generator, or draws from it. "


def _at(what: str, name: str, captured: CapturedValues) -> str:
    line = line_with(name, captured.codes())
    return f"{what} at {line}\n" if line else f"{what}. "


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest
