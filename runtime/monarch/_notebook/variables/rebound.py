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
    for name, value in list(variables.items()):
        if name in copied:
            continue
        # Code of its class may raise.
        with suppress(Exception):
            if isinstance(value, FunctionType) and _is_of_cells(value):
                _in_function(value, new)
            elif isinstance(value, type) and _is_of_cells(value):
                _in_attributes(vars(value), partial(setattr, value), new)
            elif _is_of_cells(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
                _in_attributes(vars(value), vars(value).__setitem__, new)


def _has_identity(value: Any) -> bool:
    """Return whether a value is not one of those that Python and libraries share, such as small numbers and dtypes."""
    kind: Any = class_of(value)
    # Not all of these are tracked.
    return (gc.is_tracked(value) or kind.__name__ in ("dict", "ndarray")) and not issubclass(kind, _SHARED)


def _is_of_cells(value: Any) -> bool:
    return getattr(value, "__module__", "") == "__main__"


def _in_attributes(attributes: Mapping[str, Any], put: Callable[[str, Any], object], new: Mapping[int, Any]) -> None:
    for key, each in list(attributes.items()):
        # Of a static or class method.
        function: Any = getattr(each, "__func__", each)
        if id(each) in new:
            put(key, new[id(each)])
        elif isinstance(function, FunctionType):
            _in_function(function, new)


def _in_function(function: FunctionType, new: Mapping[int, Any]) -> None:
    if function.__defaults__:
        function.__defaults__ = tuple(new.get(id(each), each) for each in function.__defaults__)
    if function.__kwdefaults__:
        function.__kwdefaults__.update({key: new.get(id(each), each) for key, each in function.__kwdefaults__.items()})
    for cell in function.__closure__ or ():
        # An empty one raises.
        with suppress(ValueError):
            cell.cell_contents = new.get(id(cell.cell_contents), cell.cell_contents)
