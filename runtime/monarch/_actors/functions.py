"""Functions of this package that other processes of the session call by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from monarch.exceptions import ArgumentError


@functools.lru_cache(maxsize=64)
def function_of(name: str) -> Callable[..., Any]:
    """The function of a name as ``monarch.<module>:<function>``; ArgumentError for any other."""
    module, _, function = name.partition(":")
    if not module.startswith("monarch.") or not function:
        raise ArgumentError(f"{name!r} is no function of Monarch")
    return getattr(importlib.import_module(module), function)
