"""The parts of a value as a debugger shows them, one level at a time, without running code of the value's class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from monarch._core.kinds import class_of, is_tuple
from monarch._notebook.who.kinds import (
    NOTHING,
    is_array,
    is_module,
    is_of,
    is_tensor,
    look_at,
    member_of,
    part_of,
    vars_of,
)
from monarch._notebook.who.sizes import attributes_of

ITEM, KEY, ATTRIBUTE = "item", "key", "attribute"
_CLOSED: tuple[Any, ...] = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, bytearray, int, float, complex,
)  # fmt: skip
_SETS: tuple[Any, ...] = (set, frozenset)
_PLAIN = (str, int, float, bool, bytes, type(None))
_DICT: Any = dict
_TENSOR = ("shape", "dtype", "device", "requires_grad")
_HELD = ("_parameters", "_buffers", "_modules")
"""The dicts of a torch module, whose entries are its attributes."""
_ELEMENTS = 100
"""Elements of an array that are shown."""


class ValuePart(NamedTuple):
    """A part of a value."""

    name: str
    step: tuple[str, Any]
    """How it is reached: ITEM with an index, KEY with the number of the key, or ATTRIBUTE with a name."""
    value: Any
    suffix: str
    """Behind the expression of the whole, in Python; empty if there is none."""


def counts_of(value: Any) -> tuple[int, int]:
    """Return how many parts of a value have an index, and whether others have a name (at least one)."""
    if is_array(value):
        return _elements(value), 1
    if is_of(value, list, tuple, *_SETS):
        return len(value), 0
    if is_of(value, dict):
        return 0, _DICT.__len__(value)
    if is_of(value, *_CLOSED):
        return 0, 0
    return 0, 1 if next(_attributes(value), None) is not None else 0


def children_of(value: Any, start: int = 0) -> Iterator[ValuePart]:
    """Return the parts of a value in order, from the ``start``-th of those with an index on; named ones come first."""
    if is_array(value):
        if not start:
            yield from _attributes(value)
        for at in range(start, _elements(value)):
            yield ValuePart(f"[{at}]", (ITEM, at), value[at], f"[{at}]")
    elif is_of(value, list, tuple):
        names = _field_names(value)
        for at in range(start, len(value)):
            yield ValuePart(str(names[at]) if names else str(at), (ITEM, at), value[at], f"[{at}]")
    elif is_of(value, *_SETS):
        for at, each in enumerate(islice(list(value), start, None), start):
            yield ValuePart(str(at), (KEY, at), each, "")
    elif is_of(value, dict):
        for at, (key, each) in enumerate(islice(list(_DICT.items(value)), start, None), start):
            plain = type(key) in _PLAIN
            yield ValuePart(
                repr(key) if plain else class_of(key).__name__, (KEY, at), each, f"[{key!r}]" if plain else ""
            )
    elif not is_of(value, *_CLOSED):
        yield from _attributes(value)


def child_of(value: Any, step: tuple[str, Any]) -> Any:
    """Return a part of a value.

    Raises:
        LookupError: it is gone.
    """
    kind, key = step
    if kind == ITEM:
        return value[key]
    if kind == KEY:
        items: Any = list(_DICT.values(value)) if is_of(value, dict) else list(value)
        return items[key]
    found = next((each for each in _attributes(value) if each.name == key), None)
    if found is None:
        raise LookupError(f"no attribute {key!r}")
    return found.value


def replace_child(value: Any, name: str, new: Any) -> None:
    """Put something in the place of a part of a value, as code would.

    Args:
        value: the whole.
        name: the name of the part, as ``children_of`` gives it.
        new: the new part.

    Raises:
        LookupError: the value has no part of that name.
        TypeError: its parts cannot be changed.
    """
    step = next((each.step for each in children_of(value) if each.name == name), None)
    if step is None:
        raise LookupError(f"no part {name!r}")
    if step[0] == ATTRIBUTE:
        setattr(value, name, new)
    elif step[0] == KEY and not is_of(value, dict):
        raise TypeError(f"a part of a {class_of(value).__name__} cannot be replaced")
    else:
        keys: list[Any] = list(_DICT.keys(value)) if step[0] == KEY else []
        value[keys[step[1]] if keys else step[1]] = new


def _field_names(value: Any) -> tuple[Any, ...] | None:
    """Return the names of the items of a named tuple; None for another list or tuple."""
    names = member_of(class_of(value), "_fields")
    return names if is_tuple(names) and len(names) == len(value) else None


def _elements(array: Any) -> int:
    """Return how many elements of an array are shown, rows if it has several dimensions."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    exact = [getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)]
    if not any(class_of(array) is each for each in [*exact, getattr(numpy, "ndarray", None)]):
        # Of another class, code of its own would run.
        return 0
    shape = look_at(array, "shape")
    return min(_ELEMENTS, int(shape[0])) if len(shape) else 0


def _attributes(value: Any) -> Iterator[ValuePart]:
    for name, each in _named(value):
        if type(name) is str and not (name.startswith("__") and name.endswith("__")):
            yield ValuePart(name, (ATTRIBUTE, name), each, f".{name}" if name.isidentifier() else "")


def _named(value: Any) -> Iterator[tuple[Any, Any]]:
    if is_array(value):
        yield from _of_array(value)
        return
    attributes: dict[Any, Any] = attributes_of(value)
    if is_module(value):
        for held in _HELD:
            entries: dict[Any, Any] = attributes.get(held) or {}
            yield from list(entries.items())
        yield from [(name, each) for name, each in list(attributes.items()) if name not in _HELD]
        return
    yield from list(attributes.items())
    for base in part_of(class_of(value), "__mro__"):
        slots: Any = vars_of(base).get("__slots__", ())
        names: list[str] = [slots] if type(slots) is str else list(slots)
        for name in names:
            if name not in ("__dict__", "__weakref__") and member_of(class_of(value), name) is not NOTHING:
                try:
                    yield name, object.__getattribute__(value, name)
                except AttributeError:
                    continue


def _of_array(array: Any) -> Iterator[tuple[str, Any]]:
    for name in _TENSOR if is_tensor(array) else ("shape", "dtype", "nbytes"):
        try:
            found = look_at(array, name)
        except Exception:
            # Not of this kind, or its library cannot say for its layout.
            continue
        yield name, tuple(found) if name == "shape" else found
    if is_tensor(array):
        try:
            grad = look_at(array, "grad") if look_at(array, "is_leaf") else None
        except Exception:
            return
        if grad is not None:
            yield "grad", grad
