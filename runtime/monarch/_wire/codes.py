"""Code objects in a pickle keep the name of their file, by which frames, breakpoints and errors find their cell."""

from __future__ import annotations

import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, cast

import cloudpickle

from monarch._wire.torch_constants import DispatchTable

Reducer = Callable[[Any], Any]


def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Return how a pickle makes this code object."""
    # cloudpickle 3.1.3 and later replace the name of the file, for pickles that are equal in each session.
    make, args = _reduce(code)
    # A string of its own: whether a shared one is memoized depends on chance, and equal functions would differ.
    return _make_code, ("".join(list(code.co_filename)), make, *args)


def _make_code(filename: str, make: Callable[..., types.CodeType], *args: Any) -> types.CodeType:
    code = make(*args)
    return code if code.co_filename == filename else code.replace(co_filename=filename)


# Without its last map, the one of plain pickle.
_theirs = cast("ChainMap[Any, Reducer]", cloudpickle.Pickler.dispatch_table).maps[:-1]
_reduce = _theirs[-1][types.CodeType]
# Not a ChainMap, which is Python for each object.
DISPATCH_TABLE = DispatchTable({types.CodeType: reduce_code}, *_theirs)
"""For subclasses of ``cloudpickle.Pickler``."""
