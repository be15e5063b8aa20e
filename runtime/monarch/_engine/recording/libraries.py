"""Code that is not the user's: what it uses is not looked at."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from typing import Any

_FOLDERS = tuple(
    {os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep}
)


def is_library_file(file: str) -> bool:
    """Return whether code is from the standard library, an installed package or this one."""
    return file.startswith("<frozen") or os.path.realpath(file).startswith(_FOLDERS)


def is_library_module(module: Any) -> bool:
    """Return whether a module is no code of the user."""
    file = getattr(module, "__file__", None)
    return getattr(module, "__name__", "") != "__main__" and (file is None or is_library_file(file))


def is_library_class(kind: type) -> bool:
    """Return whether a class is no code of the user."""
    return kind.__module__ != "__main__" and is_library_module(sys.modules.get(kind.__module__))


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that code and the functions in it use."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return found
