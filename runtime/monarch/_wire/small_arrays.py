"""Arrays and small tensors in a message of plain values: pickled without the machinery for code.

They arrive as otherwise (see ``pickling``): exact ndarrays of plain numbers in C order, and small exact CPU tensors
that own their whole storage and share it with no other tensor of the message.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from io import BytesIO
from types import ModuleType
from typing import Any, Protocol

from monarch._wire.tensor_compat import has_hooks

PLAIN, SMALL, LARGE = object(), object(), object()
_NUMBERS = frozenset("?bhilBHILefdgFDG")
"""Type characters of numbers in native byte order."""
_copy = ctypes.memmove
_bytes_at = ctypes.string_at


class BufferSink(Protocol):
    """The file that a pickle with large buffers is written to."""

    def keep(self, buffer: pickle.PickleBuffer, /) -> bool: ...
    def write(self, data: Any, /) -> object: ...


MOST = 32 * 1024
"""Size of a tensor below which one more copy costs less than pickling it in full."""


def size_of(node: Any, kind: type, limit: int, storages: dict[int, Any]) -> object:
    """Return SMALL or LARGE if ``dump_small`` or ``dump_large`` pickles this array, tensor or numpy scalar as ``dumps``
    would.

    Args:
        node: anything.
        kind: its type.
        limit: bytes of data from which it is large.
        storages: the tensors of the same message by address; this one is added.

    Returns:
        None if neither does.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if kind is numpy.ndarray:
            _TABLE[kind] = _reduce_array
            plain = node.dtype.char in _NUMBERS and node.dtype.isnative and node.flags.carray
            return (SMALL if node.nbytes < limit else LARGE) if plain else None
        if issubclass(kind, numpy.generic):
            return SMALL if node.dtype.char in _NUMBERS and kind.__module__ == "numpy" else None
    torch = sys.modules.get("torch")
    small = (
        torch is not None
        and kind is getattr(torch, "Tensor", None)
        and _is_small_tensor(torch, node, min(limit, MOST), storages)
    )
    return SMALL if small else None


def _is_small_tensor(torch: ModuleType, tensor: Any, limit: int, storages: dict[int, Any]) -> bool:
    if (
        not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.dtype not in _dtypes(torch)
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or has_hooks(tensor)
        or tensor.__dict__
        or not tensor.is_contiguous()
    ):
        return False
    size = tensor.nbytes
    if not 0 < size < limit or tensor.untyped_storage().nbytes() != size:
        return False
    return storages.setdefault(tensor.data_ptr(), tensor) is tensor


def dump_small(obj: Any) -> bytes:
    """Pickle builtin values and SMALL ones."""
    file = BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.dispatch_table = _TABLE
    pickler.dump(obj)
    return file.getvalue()


def dump_large(obj: Any, sink: BufferSink) -> None:
    """Pickle the same with LARGE values."""
    pickler = pickle.Pickler(sink, 5, buffer_callback=sink.keep)
    pickler.dispatch_table = _TABLE
    pickler.dump(obj)


def _reduce_array(array: Any) -> Any:
    # Written without a copy; arrives as a bytearray, or beside the body if it is large.
    return make_array, (array.shape, array.dtype.char, pickle.PickleBuffer(array))


def make_array(shape: tuple[int, ...], kind: str, data: bytearray | memoryview) -> Any:
    """Rebuild the array on arrival."""
    import numpy

    return numpy.ndarray(shape, kind, data)


def _reduce_tensor(tensor: Any) -> Any:
    data = _bytes_at(tensor.data_ptr(), tensor.nbytes)
    return make_tensor, (tuple(tensor.shape), _DTYPES[tensor.dtype], data, tensor.requires_grad)


def make_tensor(shape: tuple[int, ...], kind: str, data: bytes, requires_grad: bool) -> Any:
    """Rebuild the tensor on arrival, in its own memory."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, kind), device="cpu")
    _copy(tensor.data_ptr(), data, len(data))
    return tensor.requires_grad_() if requires_grad else tensor


_DTYPES: dict[Any, str] = {}
"""Names of torch dtypes that are plain numbers; filled when torch is loaded."""
_TABLE: dict[type, Any] = {}
"""How arrays and tensors are reduced; filled at first use. Every write is the same, so it needs no lock."""


def _dtypes(torch: ModuleType) -> dict[Any, str]:
    if not _DTYPES:
        _TABLE[torch.Tensor] = _reduce_tensor
        names = "float64 float32 float16 bfloat16 complex64 complex128 uint8 int8 int16 int32 int64 bool"
        # Last, since other threads take it as a sign that all is there.
        _DTYPES.update({getattr(torch, name): name for name in names.split()})
    return _DTYPES
