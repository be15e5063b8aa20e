"""A recorded step as it travels to the ranks: inside of a template, so it is sent once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from monarch._engine.issuing.encoding import Template


class RecordedOp(NamedTuple):
    """One recorded op.

    Attributes:
        template: index in the templates of the program.
        inputs: slots of its tensors.
        values: its numbers; a ``Slot`` stands for one that is new in each call.
        outputs: slots of its results, -1 for a result that is not new.
        line: number of the line that issued it.
        is_random: whether its last number is a seed.
    """

    template: int
    inputs: tuple[int, ...]
    values: tuple[Any, ...]
    outputs: tuple[int, ...]
    line: int
    is_random: bool


class Slot(NamedTuple):
    """The place of a number in the message of a call."""

    place: int


@dataclass(frozen=True)
class RecordedProgram:
    """The ops of a recorded step.

    Attributes:
        uid: the uid of the recording.
        name: the name of the function.
        backend: "eager" or "inductor".
        templates: the templates of its ops.
        steps: in the order of the program.
        inputs: how many tensors it takes; they have the first slots.
        examples: the numbers of the call that was recorded, which stand in for new ones while the graph is made.
        outputs: slots of its results.
        lines: text of each line, for the graph.
    """

    uid: int
    name: str
    backend: str
    templates: tuple[Template, ...]
    steps: tuple[RecordedOp, ...]
    inputs: int
    examples: tuple[Any, ...]
    outputs: tuple[int, ...]
    lines: dict[int, str]


class ReplayError(Exception):
    """An op of a recorded step failed.

    Attributes:
        op: its name.
        line: number of the line that issued it.
        cause: what it raised.
    """

    def __init__(self, op: str, line: int, cause: BaseException) -> None:
        super().__init__(f"{op}: {cause}")
        self.op = op
        self.line = line
        self.cause = cause
