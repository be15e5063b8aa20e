"""The signature of an op: what its plan depends on, apart from its tensors and numbers."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from monarch._engine.issuing.encoding import Input, Value
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import MeshOpError


class OpSignature(NamedTuple):
    """An op, looked at once: hashing one takes as long as the rest of a look.

    Attributes:
        number: stands for the op in signatures.
        is_alias: whether its result is the same tensor to the ranks.
        is_view_in_place: whether it gives a tensor another shape.
        special: another way than the stream; None for the usual one.
        floats: whether numbers with a fraction leave its metadata alone.
    """

    number: int
    is_alias: bool
    is_view_in_place: bool
    special: Any
    floats: bool


class Signature:
    """The key of an op in the plans of its mesh, and its tensors and numbers."""

    __slots__ = ("floats", "is_mixed", "key", "tensors", "values")

    def __init__(self, kind: OpSignature) -> None:
        self.key: list[Any] = [kind.number]
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []
        self.is_mixed = False
        """Whether some tensors are the program's."""
        self.floats = kind.floats

    def add(self, arg: Any) -> None:
        """Add an argument."""
        kind = arg.__class__
        key = self.key
        if kind is Tensor:
            key.append(arg.monarch_layout)
            self.tensors.append(arg)
        elif kind is float and self.floats:
            key.append(float)
            self.values.append(arg)
        elif kind is list or kind is tuple:
            key.append(len(arg))
            for each in arg:
                self.add(each)
        elif kind is int or kind is bool:
            key.append(kind)
            key.append(arg)
        elif isinstance(arg, torch.Tensor):
            self._add_tensor(arg)
        elif isinstance(arg, torch.Generator):
            raise MeshOpError(
                "ops on distributed tensors do not take a generator; set their seed with torch.manual_seed()"
            )
        else:
            key.append(arg)

    def _add_tensor(self, arg: Any) -> None:
        if isinstance(arg, Tensor):
            self.key.append(arg.monarch_layout)
            self.tensors.append(arg)
            return
        self.is_mixed = True
        self.tensors.append(arg)


def skeleton(arg: Any, tensors: list[int], values: list[int], floats: bool) -> Any:
    """Return an argument with an Input for each tensor and a Value for each number, counted from the left."""
    if isinstance(arg, torch.Tensor):
        tensors[0] += 1
        return Input(tensors[0] - 1)
    if arg.__class__ is float and floats:
        values[0] += 1
        return Value(values[0] - 1)
    if isinstance(arg, list | tuple):
        return [skeleton(each, tensors, values, floats) for each in cast("list[Any]", arg)]
    return arg
