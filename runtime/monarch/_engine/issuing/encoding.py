"""How ops travel to the ranks: the format of a batch.

A batch is one pickled list of entries, which each rank runs in order. An entry is one of:

- ``(NEW, number, template)``: a ``Template``, before its first use.
- ``(number, inputs, values, outputs, line)``: run a template. ``inputs`` are the references of its tensors, ``values``
  the numbers that change from call to call, ``outputs`` a reference for each new tensor, 0 for a result that is not
  new, and ``line`` the number of the line of the program that issued it.
- an int: forget a reference.

A template is an op with its arguments, in which an ``Input`` stands for a tensor and a ``Value`` for a number. It is
sent once, so that an op costs a few dozen bytes. References count from 1 and are never used again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import torch

from monarch._core.kinds import is_list
from monarch._engine.dtensor_compat import overload_of, schema_of
from monarch._wire.torch_constants import DispatchTable

NEW = "new"
CALL = "call"
"""Kind of an entry that a halted rank keeps for later, as a shard from the program: a function and its arguments."""
Entry = tuple[Any, ...] | int
_TABLE = DispatchTable({})


class Input(NamedTuple):
    """The place of a tensor in the arguments of a template."""

    place: int


class Value(NamedTuple):
    """The place of a number in the arguments of a template."""

    place: int


class Template(NamedTuple):
    """An op and its arguments.

    Attributes:
        kind: "aten" for an op on DTensors; "local" for one on whole values, which has no sharding rule; else the name
            of an operation of the engine: see ``rank/operations/table.py``.
        op: namespace, name and overload of an op of torch; () otherwise.
        args: positional arguments, nested in lists.
        kwargs: keyword arguments.
        writes: indices of the tensors that the op changes in place.
    """

    kind: str
    op: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[int, ...] = ()


def op_name(op: Any) -> tuple[str, ...]:
    """Return the name of an op of torch for the wire."""
    namespace, name = schema_of(op).name.split("::")
    return namespace, name, overload_of(op)


def find_op(name: tuple[str, ...]) -> Any:
    """Return the op of a name."""
    namespace, packet, overload = name
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def pack(entries: list[Entry]) -> bytes:
    """Return a batch for the wire."""
    file = BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.dispatch_table = _TABLE
    pickler.dump(entries)
    return file.getvalue()


def unpack(batch: bytes) -> list[Entry]:
    """Return the entries of a batch, from an authenticated sender."""
    return pickle.loads(batch)


Fill = Callable[[Any, Any], tuple[list[Any], dict[str, Any]]]
"""Returns the arguments of an op for its tensors and numbers."""


def filler(template: Template) -> Fill:
    """Return a function that puts tensors and numbers in their places."""
    args, kwargs = list(template.args), template.kwargs
    inputs = [(at, arg.place) for at, arg in enumerate(args) if isinstance(arg, Input)]
    values = [(at, arg.place) for at, arg in enumerate(args) if isinstance(arg, Value)]
    nested: list[tuple[int, Any]] = [(at, arg) for at, arg in enumerate(args) if is_list(arg)]
    simple = not any(isinstance(each, Input | Value | list) for each in kwargs.values())

    def fill(tensors: Any, numbers: Any) -> tuple[list[Any], dict[str, Any]]:
        filled = args.copy()
        for at, index in inputs:
            filled[at] = tensors[index]
        for at, index in values:
            filled[at] = numbers[index]
        for at, arg in nested:
            filled[at] = _fill(arg, tensors, numbers)
        return filled, kwargs if simple else {key: _fill(each, tensors, numbers) for key, each in kwargs.items()}

    return fill


def _fill(arg: Any, tensors: Any, numbers: Any) -> Any:
    if isinstance(arg, Input):
        return tensors[arg.place]
    if isinstance(arg, Value):
        return numbers[arg.place]
    if is_list(arg):
        return [_fill(each, tensors, numbers) for each in arg]
    return arg
