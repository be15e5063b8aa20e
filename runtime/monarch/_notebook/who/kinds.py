"""Checks of types that run no code of a value: ``isinstance`` asks a value for its ``__class__``."""

from __future__ import annotations

import sys
from typing import Any, cast

from monarch._wire.tensor_compat import stored_attribute

_TYPE = vars(type)
NOTHING: Any = object()


def is_of(value: object, *kinds: Any) -> bool:
    """Return whether the type of a value is one of some types, or derived from one; other objects are no types."""
    return issubclass(type(value), tuple(each for each in kinds if issubclass(type(each), type)))


def is_one(kind: object, kinds: Any) -> bool:
    """Return whether an object is one of others; a class may have an ``__eq__`` and a ``__hash__`` of its own."""
    return any(kind is each for each in kinds)


def part_of(kind: type[Any], name: str) -> Any:
    """Return an attribute that each class has, such as ``__name__``, without its metaclass."""
    return _TYPE[name].__get__(kind)


def text_of(kind: type[Any], name: str) -> str:
    """Return such an attribute as a text; empty if the class has replaced it by something else."""
    text = part_of(kind, name)
    return text if type(text) is str else ""


def member_of(kind: type[Any], name: str) -> Any:
    """Return an attribute of a class or its bases as it is stored, or NOTHING."""
    return next((vars_of(base)[name] for base in part_of(kind, "__mro__") if name in vars_of(base)), NOTHING)


def vars_of(kind: type[Any]) -> dict[str, Any]:
    """Return the attributes that a class itself defines."""
    return cast("dict[str, Any]", part_of(kind, "__dict__"))


def is_users(kind: type[Any]) -> bool:
    """Return whether cells have defined a class."""
    return text_of(kind, "__module__") == "__main__"


def has(kind: type[Any], *names: str) -> bool:
    """Return whether a class or one of its bases has one of some attributes."""
    return any(member_of(kind, name) is not NOTHING for name in names)


def is_array(value: object) -> bool:
    """Return whether a value is an array, a tensor or a data frame of a library."""
    kind = type(value)
    if is_of(value, getattr(sys.modules.get("numpy"), "generic", None)) or (is_users(kind) and not is_tensor(value)):
        return False
    return has(kind, "shape") and has(kind, "dtype", "dtypes")


def is_module(value: object) -> bool:
    """Return whether a value is a torch module."""
    return is_of(value, getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None))


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch, of any subclass."""
    return is_of(value, getattr(sys.modules.get("torch"), "Tensor", None))


def look_at(array: Any, name: str) -> Any:
    """Return an attribute of an array, of a tensor without the code of its class."""
    return stored_attribute(sys.modules["torch"], array, name) if is_tensor(array) else getattr(array, name)


def array_size(array: Any) -> int:
    """Return the bytes of the elements of an array; 0 if it does not say, as a sparse tensor."""
    try:
        return int(look_at(array, "nbytes"))
    except Exception:
        return 0
