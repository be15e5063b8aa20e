"""Variables that a copy has replaced, where functions, classes and objects of cells still have the old value."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from monarch._core.kinds import class_of

_ITEMS = 1_000
"""Most items of a list or dict that are looked at."""
_SHARED = (tuple, frozenset, Enum, FunctionType, ModuleType, type)
"""Types whose values are the same for all who name them."""


def rebind(variables: Mapping[str, Any], before: Mapping[str, Any], copied: Mapping[str, Any]) -> None:
    """Put new values in the place of old ones: in default arguments, closures, class attributes and other objects.

    Args:
        variables: all variables.
        before: the values that the copied ones had before.
        copied: the copied variables.
    """
    new = {
        id(before[name]): value
        for name, value in copied.items()
        if name in before and before[name] is not value and _has_identity(before[name])
    }
    if not new:
        return
    seen = set[int]()
    for name, value in list(variables.items()):
        if name not in copied and is_rebound(value):
            # Code of its class may raise.
            with suppress(Exception):
                _in_value(value, new, seen)


def is_rebound(value: Any) -> bool:
    """Return whether a value is a function, a class or an object of cells, which ``rebind`` looks into."""
    kind: Any = class_of(value)
    if kind is FunctionType or issubclass(kind, type):
        return _is_of_cells(value)
    return _is_of_cells(kind)


def _in_value(value: Any, new: Mapping[int, Any], seen: set[int]) -> None:
    kind: Any = class_of(value)
    attributes: Any = getattr(value, "__dict__", None)
    if kind is FunctionType:
        _in_function(value, new, seen)
    elif issubclass(kind, type):
        _in_items(attributes, partial(setattr, value), new, seen)
    elif class_of(attributes) is dict:
        _in_items(attributes, attributes.__setitem__, new, seen)


def _has_identity(value: Any) -> bool:
    """Return whether a value is not one of those that Python and libraries share, such as small numbers and dtypes."""
    kind: Any = class_of(value)
    # Not all of these are tracked.
    return (gc.is_tracked(value) or kind.__name__ in ("dict", "ndarray")) and not issubclass(kind, _SHARED)


def _is_of_cells(value: Any) -> bool:
    return getattr(value, "__module__", "") == "__main__"


def _in_items(
    items: Mapping[Any, Any], put: Callable[[Any, Any], object], new: Mapping[int, Any], seen: set[int]
) -> None:
    """Replace values of a dict or of attributes, and inside of those that are functions, lists and dicts."""
    for key, each in list(items.items()):
        # Of a static or class method.
        function: Any = getattr(each, "__func__", each)
        if id(each) in new:
            put(key, new[id(each)])
        elif isinstance(function, FunctionType):
            _in_function(function, new, seen)
        elif class_of(each) in (list, dict) and len(each) <= _ITEMS and id(each) not in seen:
            seen.add(id(each))
            inside: dict[Any, Any] = each if class_of(each) is dict else {at: each[at] for at in range(len(each))}
            _in_items(inside, each.__setitem__, new, seen)


def _in_function(function: FunctionType, new: Mapping[int, Any], seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    if function.__defaults__:
        function.__defaults__ = tuple(new.get(id(each), each) for each in function.__defaults__)
    if function.__kwdefaults__:
        function.__kwdefaults__.update({key: new.get(id(each), each) for key, each in function.__kwdefaults__.items()})
    for cell in function.__closure__ or ():
        # An empty one raises.
        with suppress(ValueError):
            kept = cell.cell_contents
            if id(kept) in new:
                cell.cell_contents = new[id(kept)]
            elif isinstance(kept, FunctionType):
                # Such as that inside of a decorator.
                _in_function(kept, new, seen)
