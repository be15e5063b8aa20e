"""Checks of types that run no code of a value: ``isinstance`` asks a value for its ``__class__``."""

from __future__ import annotations

import sys
from typing import Any

from monarch._core.digests.arrays import is_array as is_any_array


def is_of(value: object, *kinds: Any) -> bool:
    """Return whether the type of a value is one of some types, or derived from one; other objects are no types."""
    return issubclass(type(value), tuple(each for each in kinds if issubclass(type(each), type)))


def is_array(value: object) -> bool:
    """Return whether a value is an array, a tensor or a data frame of a library."""
    kind = type(value)
    return hasattr(kind, "shape") and (kind.__module__ != "__main__" or is_tensor(value)) and is_any_array(value)


def is_module(value: object) -> bool:
    """Return whether a value is a torch module."""
    return is_of(value, getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None))


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch, of any subclass."""
    return is_of(value, getattr(sys.modules.get("torch"), "Tensor", None))
