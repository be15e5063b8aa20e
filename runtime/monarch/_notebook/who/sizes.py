"""Bytes of a value with its parts, read in bounded time."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from monarch._core.kinds import class_of
from monarch._notebook.who.kinds import array_size, has, is_array, is_module, is_of, look_at, member_of

PARTS = 2000
"""Parts of one value that are counted."""
# Not by the name of an attribute, which a metaclass may define.
_BASIC, _ITEM = type.__dict__["__basicsize__"], type.__dict__["__itemsize__"]
_DICT: Any = dict
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_CLOSED: tuple[Any, ...] = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, bytearray, int, float, complex,
)  # fmt: skip
"""Types whose parts do not belong to the value, or that have none."""


class Size(NamedTuple):
    """The bytes of a value."""

    bytes: int
    complete: bool
    """Whether all parts are counted."""


def bytes_of(value: object) -> Size:
    """Return the bytes of a value: of elements of arrays, of items, of attributes, each object once."""
    # Parts are held, so that no other object takes the address of one.
    seen: dict[int, Any] = {id(value): value}
    waiting: deque[Any] = deque([value])
    count = 0
    complete = True
    while waiting:
        room = PARTS - len(seen)
        try:
            own, parts = _own(waiting.popleft())
            some = list(islice(parts, room + 1))
        except Exception:
            # A container may change while it is read.
            own, some, complete = 0, [], False
        count += own
        complete = complete and len(some) <= room
        new = {id(part): part for part in some[:room] if id(part) not in seen}
        seen.update(new)
        waiting.extend(new.values())
    return Size(count, complete)


def tensors_of(module: Any) -> list[Any]:
    """Return the parameters and buffers of a torch module, without methods that its class may override."""
    base: Any = sys.modules["torch"].nn.Module
    return [each for _, each in chain(base.named_parameters(module), base.named_buffers(module))]


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an instance that are not computed."""
    if is_of(member_of(type(value), "__dict__"), property):
        return {}
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _own(value: Any) -> tuple[int, Iterable[Any]]:
    """Return the bytes of an object without its parts, and these."""
    if is_array(value):
        is_frame = has(class_of(value), "memory_usage") and len(look_at(value, "shape")) == 2
        return int(value.memory_usage().sum()) if is_frame else array_size(value), ()
    if is_module(value):
        return 0, tensors_of(value)
    if is_of(value, dict):
        return _DICT.__sizeof__(value), chain.from_iterable(_DICT.items(value))
    kind: Any = next((each for each in (*_CLOSED, *_CONTAINERS) if is_of(value, each)), None)
    if kind is None:
        # The number of items of others is not where object looks for it: a generator would have a million GiB.
        cls = class_of(value)
        own = _BASIC.__get__(cls) if _ITEM.__get__(cls) else object.__sizeof__(value)
        return own, attributes_of(value).values()
    return kind.__sizeof__(value), () if kind in _CLOSED else kind.__iter__(value)
