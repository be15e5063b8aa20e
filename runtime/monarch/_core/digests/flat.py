"""The elements of a numpy array or a torch tensor in row-major order, read in parts."""

from __future__ import annotations

import sys
from hashlib import sha256
from typing import Any

from monarch._core.digests.arrays import PART, UnknownContentsError, plain_bytes
from monarch._core.kinds import class_of

_KINDS = {
    "float64": "d", "float32": "f", "float16": "e", "bfloat16": "bf", "complex64": "F", "complex128": "D", "bool": "?",
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    # As they are read, since few operations take them.
    "float8_e4m3fn": "f", "float8_e5m2": "f", "float8_e4m3fnuz": "f", "float8_e5m2fnuz": "f",
}  # fmt: skip
"""The kind of an element, as in ``elements.values_in``, by the name of a dtype."""
_MARK = 12
"""Bytes of a hash."""


class Flat:
    """An array as a row of elements.

    Args:
        value: a dense tensor, or an array of numbers.

    Raises:
        UnknownContentsError: it is of a subclass, layout or dtype whose contents are not plain bytes.
    """

    def __init__(self, value: Any) -> None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if class_of(value) is getattr(numpy, "ndarray", None):
            if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16 or not value.dtype.isnative:
                raise UnknownContentsError
            self._row = value.reshape(-1)
            where = ""
        elif class_of(value) in _plain(torch):
            if value.is_quantized or value.is_nested or str(value.layout) != "torch.strided":
                raise UnknownContentsError
            # Metadata of autograd is not a part of the value, and reading through it would record operations.
            self._row = value.detach().reshape(-1)
            where = f" on {value.device.type}"
        else:
            raise UnknownContentsError
        self.shape = tuple(int(size) for size in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        self.kind = _KINDS.get(dtype, "")
        self.count = int(self._row.shape[0])
        self.form = f"{dtype}[{', '.join(map(str, self.shape))}]{where}"

    def data(self, start: int, stop: int) -> bytes:
        """Return the bytes of consecutive elements; all NaNs are the same."""
        return bytes(plain_bytes(self._row[start:stop]))

    def hashes(self, start: int, stop: int, step: int) -> list[bytes]:
        """Return a hash for each ``step`` elements of a range."""
        return [self._hash(at, min(at + step, stop)) for at in range(start, stop, step)]

    def mark(self) -> bytes:
        """Return a hash of all elements."""
        return self._hash(0, self.count)

    def _hash(self, start: int, stop: int) -> bytes:
        found = sha256()
        for at in range(start, stop, PART):
            found.update(plain_bytes(self._row[at : min(at + PART, stop)]))
        return found.digest()[:_MARK]


def _plain(torch: Any) -> tuple[Any, ...]:
    # A module that another thread is still importing may lack a name.
    nn = getattr(torch, "nn", None)
    found = (getattr(torch, "Tensor", None), getattr(nn, "Parameter", None), getattr(nn, "Buffer", None))
    return tuple(each for each in found if isinstance(each, type))
