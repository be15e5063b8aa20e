"""Records the ops of one call of a step, and what it computes in the program itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.observer import current
from monarch._engine.issuing.stream import OpStream, Ref, new_number
from monarch._engine.recording.draws import Draws
from monarch._engine.recording.generators import Entropy
from monarch._engine.recording.modes import Functions, Ops
from monarch._engine.recording.tape import Number, Tape
from monarch._engine.recording.tokens import Tokens
from monarch._engine.recording.values import Values
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import ArgumentError


class Issued(NamedTuple):
    """An op as it was issued; values are constants, or the names of numbers on the tape."""

    template: int
    inputs: tuple[int, ...]
    values: tuple[Any, ...]
    outputs: tuple[int, ...]
    line: int
    is_random: bool


class Named(NamedTuple):
    """A number that is new in each call.

    Attributes:
        name: on the tape.
        example: its value in the recorded call.
    """

    name: str
    example: Any


class Recorder:
    """Watches one call of a step, in the thread that makes it.

    Args:
        name: the name of the function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tape = Tape()
        self.tokens = Tokens()
        self.values = Values(self, self.tape)
        self.draws = Draws(self.tape)
        self.ops: list[Issued] = []
        self.stream: OpStream | None = None
        self.mesh: Any = None
        """Of the tensors: a TensorMesh."""
        self.first = new_number()
        """References from here on are new."""
        self.held: dict[int, Ref] = {}
        """References from before."""
        self.constants: dict[int, Ref] = {}
        """References of values of the program that an op takes."""
        self.refusal: str | None = None
        self.inside = False
        """Whether the engine itself computes."""
        self._entropy = Entropy(self._refuse_draw)
        self._depth = 0
        """How many ops on distributed tensors are being issued."""
        self.modes: tuple[Any, ...] = Functions(self), Ops(self)
        """In the thread that records, and in those of autograd while it runs backward for this one."""

    def __enter__(self) -> Recorder:
        self._entropy.start()
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(kind, error, trace)
        self._entropy.stop()

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that ends the recording."""
        self.refusal = f"{self.name} cannot be recorded: {why}"
        raise ArgumentError(self.refusal)

    def _refuse_draw(self, what: str, line: str) -> NoReturn:
        self.refuse(
            f"{what} at {line}\nLater calls would not repeat that. Draw it outside, and pass it as an argument."
        )

    def here(self) -> str:
        """Return the line of the program that runs, as a traceback has it."""
        return str(lines[lines.here()])

    def number_of(self, value: Any) -> Number | None:
        """Return the number that differs from call to call and stands behind a value."""
        try:
            return self.tokens.find(value)
        except ArithmeticError:
            self.refuse(
                f"torch computes with a number that differs from call to call, in a way that cannot be repeated, at "
                f"{self.here()}\nPass the number as a distributed tensor."
            )

    def issued(
        self,
        stream: OpStream,
        number: int,
        inputs: tuple[int, ...],
        values: tuple[Any, ...],
        outputs: tuple[int, ...],
        line: int,
    ) -> tuple[Any, ...]:
        """Note an op, and return its numbers."""
        if self.stream is None:
            self.stream = stream
        elif stream is not self.stream:
            self.refuse(f"it computes on two meshes. Record a step for each. The second one is used at {self.here()}")
        named: list[Any] = []
        is_random = False
        for value in values:
            found: Number | None = value if isinstance(value, Number) else self.number_of(value)
            seed = self.draws.names.get(int(value)) if value.__class__ is int else None
            if seed is not None:
                named.append(Named(seed, value))
                is_random = True
            else:
                named.append(Named(found.name, float(found)) if found is not None else value)
        self.ops.append(Issued(number, inputs, tuple(named), outputs, line, is_random))
        return tuple([each.example if isinstance(each, Named) else each for each in named])

    def local(self) -> None:
        """Refuse a rank-local tensor."""
        self.refuse(
            f"it uses a rank-local tensor at {self.here()}\nRecorded steps compute with distributed "
            f"tensors. Convert it with monarch.from_local(tensor, mesh, spec), or use it outside the step."
        )

    def looked(self) -> None:
        """Refuse a look at a value."""
        self.refuse(
            f"it reads a value at {self.here()}\nLater calls would not repeat what Python does with it. "
            f"Return the tensor from {self.name} and read it afterwards, or use torch.where instead of a branch."
        )

    @contextmanager
    def mesh_op(self, tensors: list[torch.Tensor]) -> Generator[None]:
        """Watch an op on distributed tensors."""
        for each in tensors:
            if not isinstance(each, Tensor):
                self.values.uses(each)
                continue
            self.mesh = each.monarch_layout.mesh
            if each.monarch_ref.number < self.first:
                self.held[each.monarch_ref.number] = each.monarch_ref
        self._depth += 1
        try:
            with current.through():
                yield
        finally:
            self._depth -= 1

    def number_in(self, value: torch.Tensor) -> Number | None:
        """Return the number in a plain tensor that meets distributed tensors; None if it stays the same."""
        if value.numel() != 1 or not value.is_floating_point() or not self.values.differs(value):
            return None
        return self.values.number(value, self.seen(value))

    def seen(self, value: torch.Tensor) -> float:
        """Return the number in a plain tensor, for the engine itself."""
        self.inside = True
        try:
            return float(value)
        finally:
            self.inside = False

    def put(self, made: Tensor, value: torch.Tensor) -> None:
        """Note a value of the program among the tensors of an op."""
        if self._depth == 0:
            self.refuse(
                f"it distributes a tensor at {self.here()}\nLater calls would use the same values again. "
                f"Distribute it outside, and pass it as an argument."
            )
        if self.values.differs(value):
            self.refuse(
                f"a plain tensor that changes from call to call is combined with distributed tensors at "
                f"{self.here()}\n"
                f"Distribute it outside, and pass it as an argument."
            )
        if value.numel() > 1 and not self.values.is_known(value):
            self.refuse(
                f"a plain tensor of shape {tuple(value.shape)} is combined with distributed tensors at "
                f"{self.here()}\n"
                f"Distribute it outside, and pass it as an argument."
            )
        self.constants[made.monarch_ref.number] = made.monarch_ref

    def seed(self) -> int | None:
        """Draw a seed, and note that later calls draw one here too."""
        if self.inside:
            return None
        self.inside = True
        try:
            return self.draws.draw()
        finally:
            self.inside = False
