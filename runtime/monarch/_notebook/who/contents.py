"""Marks of small values: two values with equal marks have equal contents."""

from __future__ import annotations

import sys
from typing import Any

from monarch._core.digests.values import digest_of
from monarch._core.kinds import class_of
from monarch._notebook.who.kinds import array_size, is_array, is_of, is_one, text_of

SMALL = 64 << 10
"""Maximum bytes of a value whose contents are read."""
_SCALARS = {int, float, complex, bool, type(None)}
_TEXTS = {str, bytes, bytearray}
_ITEMS = {list, tuple, set, frozenset}
_SCALAR = 32
"""Bytes that a scalar counts for."""


def mark_of(value: object) -> str:
    """Return the mark of a small value of plain parts; empty for others, and for values on a GPU.

    A GPU may be behind a collective that does not end, and user classes may run any code.
    """
    digest = digest_of(value) if _Budget().takes(value) else None
    return digest.whole[:32] if digest is not None else ""


def is_plain(value: object) -> bool:
    """Return whether a value is small, on the CPU, and without objects of user classes."""
    return _Budget().takes(value)


class _Budget:
    """The bytes that may still be read."""

    def __init__(self) -> None:
        self._left = SMALL

    def takes(self, value: Any) -> bool:
        """Return whether a value is plain and fits."""
        kind = class_of(value)
        if is_one(kind, _SCALARS):
            return self._pay(_SCALAR)
        if is_one(kind, _TEXTS):
            return self._pay(_SCALAR + len(value))
        if is_one(kind, _ITEMS):
            return self._pay(_SCALAR + 8 * len(value)) and all(self.takes(each) for each in tuple(value))
        if kind is dict:
            pairs = value.items()
            return self._pay(_SCALAR + 16 * len(value)) and all(self.takes(each) for each in tuple(pairs))
        return _is_plain_array(value) and self._pay(_SCALAR + array_size(value))

    def _pay(self, count: int) -> bool:
        self._left -= count
        return self._left >= 0


def _is_plain_array(value: Any) -> bool:
    """Return whether it is a numpy array or scalar, or a dense tensor on the CPU, of elements that are no objects."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if is_of(value, getattr(numpy, "generic", None)):
        return text_of(class_of(value), "__module__") == "numpy" and value.dtype.kind != "O"
    if type(value) is getattr(numpy, "ndarray", None):
        return value.dtype.kind != "O"
    plain = (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
    if not is_array(value) or not is_one(class_of(value), plain):
        return False
    return value.device.type == "cpu" and value.layout == getattr(torch, "strided", None)
