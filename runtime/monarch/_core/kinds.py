"""Checks of values of unknown types: by ``isinstance`` a type checker would know nothing of the parts of a dict.

Also checks of arguments, which may be wrong in spite of their types; there a type checker would call ``isinstance``
unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeGuard

kind_of: Callable[[Any], type[Any]] = type
"""For type checkers, to which the type of an Any is unknown."""


def is_a(value: object, *kinds: type) -> bool:
    """Return whether an argument is of one of some types."""
    return isinstance(value, kinds)


def is_count(value: object, least: int = 0) -> bool:
    """Return whether an argument is a number, not a bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is a dict."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Return whether a value is a tuple."""
    return isinstance(value, tuple)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


def is_set(value: object) -> TypeGuard[set[Any]]:
    """Return whether a value is a set."""
    return isinstance(value, set)


def is_coroutine(value: object) -> TypeGuard[Coroutine[Any, Any, Any]]:
    """Return whether a value is a coroutine."""
    return isinstance(value, Coroutine)


def class_of(value: object) -> type[Any]:
    """Return the class of a value."""
    return type(value)
