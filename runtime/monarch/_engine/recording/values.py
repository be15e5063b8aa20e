"""Tensors of the program in a recorded step, such as step counts of optimizers: their changes go to the tape."""

from __future__ import annotations

from typing import Any, cast

import torch

from monarch._engine.dtensor_compat import local_scalar, schema_of, tree_leaves
from monarch._engine.recording.tape import Number, Tape


class Values:
    """The plain tensors that a step uses. Used by the thread that records.

    Args:
        recorder: a Recorder, which refuses.
        tape: for notes.
    """

    def __init__(self, recorder: Any, tape: Tape) -> None:
        self._recorder = recorder
        self._tape = tape
        self.made: dict[int, torch.Tensor] = {}
        """Tensors that the step makes, by id; kept, so that no id is used twice."""
        self.moving: dict[int, str] = {}
        """Expressions for tensors that differ from call to call, by id."""
        self.read: dict[int, torch.Tensor] = {}
        """Tensors from before, by id."""
        self.looked: dict[int, torch.Tensor] = {}
        """Those of them whose values Python has seen."""
        self._drawn: set[int] = set()
        """Addresses of tensors with random numbers."""
        self._items = 0
        """How many calls of ``item()`` run."""

    def constants(self) -> list[tuple[torch.Tensor, int]]:
        """Return tensors that must not change, with their versions."""
        changed = {id(each) for each in self._tape.changed}
        return [(each, each._version) for key, each in self.read.items() if key not in changed]

    def refuse_reads(self) -> None:
        """Refuse a step that changes a tensor whose value Python has seen."""
        if any(id(each) in self.looked for each in self._tape.changed):
            self._recorder.refuse("it reads a value of the program and changes it later")

    def uses(self, tensor: torch.Tensor) -> None:
        """Note a tensor that an op takes."""
        if id(tensor) not in self.made:
            self.read[id(tensor)] = tensor

    def differs(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with one that differs from call to call."""
        known = {**self.read, **self.made}
        moving = {_address(known[each]) for each in self.moving if each in known}
        return _address(tensor) in moving or _address(tensor) in self._drawn

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with one that was there before, or that an op has made."""
        address = _address(tensor)
        return any(_address(each) == address for each in (*self.made.values(), *self.read.values()))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; note it if its result differs from call to call."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func is local_scalar:
            if not self._items:
                self.read_whole(tensors[0])
            return func(*args, **kwargs)
        for each in tensors:
            self.uses(each)
        text = f"{self._tape.bind(func)}({self._texts(args)}{self._keywords(kwargs)})"
        args, kwargs = self._plain(args), self._plain(kwargs)
        written = [each for each in _written(func, args, kwargs) if id(each) not in self.made]
        result = func(*args, **kwargs)
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        for each in results:
            if id(each) not in self.read:
                self.made[id(each)] = each
        if torch.Tag.nondeterministic_seeded in func.tags or any(_address(each) in self._drawn for each in tensors):
            self._drawn.update(_address(each) for each in results)
        if written or self._found or any(self.differs(each) for each in tensors):
            self._note(text, written, [*_written(func, args, kwargs)], result)
        return result

    def _note(self, text: str, outer: list[torch.Tensor], written: list[torch.Tensor], result: Any) -> None:
        name = self._tape.name("t")
        self._tape.lines.append(f"{name} = {text}")
        for each in outer:
            self.moving[id(each)] = self._tape.bind(each)
            if not any(each is known for known in self._tape.changed):
                self._tape.changed.append(each)
        if any(id(each) in self.made and id(each) not in self.moving for each in written):
            self._recorder.refuse(
                f"it fills a plain tensor with values that differ from call to call at {self._recorder.here()}"
            )
        if isinstance(result, torch.Tensor):
            self.moving.setdefault(id(result), name)
        elif isinstance(result, list | tuple):
            for at, each in enumerate(cast("list[Any]", result)):
                self.moving.setdefault(id(each), f"{name}[{at}]")

    def _plain(self, arg: Any) -> Any:
        """Return arguments with numbers instead of tokens."""
        if isinstance(arg, list | tuple):
            items = [self._plain(each) for each in cast("list[Any]", arg)]
            return items if isinstance(arg, list) else tuple(items)
        if isinstance(arg, dict):
            return {key: self._plain(each) for key, each in cast("dict[str, Any]", arg).items()}
        number = self._recorder.number_of(arg)
        return float(number) if number is not None else arg

    def _texts(self, args: Any) -> str:
        self._found = False
        return "".join(f"{self._text(each)}, " for each in args)

    def _keywords(self, kwargs: dict[str, Any]) -> str:
        return "".join(f"{key}={self._text(each)}, " for key, each in kwargs.items())

    def _text(self, arg: Any) -> str:
        if isinstance(arg, torch.Tensor):
            return self.moving.get(id(arg)) or self._tape.bind(arg)
        if isinstance(arg, list | tuple):
            return f"[{''.join(self._text(each) + ', ' for each in cast('list[Any]', arg))}]"
        number = self._recorder.number_of(arg)
        if number is not None:
            self._found = True
            return number.name
        return repr(arg) if arg is None or arg.__class__ in (int, bool, str) else self._tape.bind(arg)

    def read_whole(self, tensor: torch.Tensor) -> None:
        """Note that Python has seen the values of a tensor; refuse if they differ from call to call."""
        if self.differs(tensor):
            self._recorder.looked()
        if id(tensor) not in self.made:
            self.read[id(tensor)] = self.looked[id(tensor)] = tensor

    def item(self, tensor: torch.Tensor, func: Any) -> Any:
        """Return the number in a tensor, noted if it can differ."""
        self._items += 1
        try:
            value = func(tensor)
        finally:
            self._items -= 1
        if _address(tensor) in self._drawn:
            self._recorder.refuse(f"it draws a random number in the program at {self._recorder.here()}")
        if id(tensor) in self.made and not self.differs(tensor):
            return value
        if not isinstance(value, float):
            self.read_whole(tensor)
            return value
        self.uses(tensor)
        return self.number(tensor, value)

    def number(self, tensor: torch.Tensor, value: float) -> Number:
        """Return the number in a tensor, noted."""
        return self._tape.number(value, f"{self.moving.get(id(tensor)) or self._tape.bind(tensor)}.item()")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            found.extend(each for each in tree_leaves(given) if isinstance(each, torch.Tensor))
    return found
