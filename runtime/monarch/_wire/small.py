"""Small arrays and tensors in a message of plain values: pickled without the machinery that code and large data need.

What is sent this way arrives as it does otherwise (see ``pickling``): exact ndarrays of plain numbers in C order, and
exact tensors of the CPU that are all of their storage and share it with no other tensor of the message.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from io import BytesIO
from types import ModuleType
from typing import Any

PLAIN, SMALL = object(), object()
_NUMBERS = frozenset("?bhilBHILefdgFDG")
"""Type characters of numbers in this machine's order of bytes."""
_copy = ctypes.memmove
_bytes_at = ctypes.string_at


MOST = 32 * 1024
"""Bytes of a tensor that is copied once more than needed, which costs less than pickling it at length."""


def is_small(node: Any, kind: type, limit: int, storages: dict[int, Any]) -> bool:
    """Whether ``dump_small`` pickles this array, tensor or numpy scalar as ``dumps`` would.

    Args:
        node: anything.
        kind: its type.
        limit: bytes of data that it must be below.
        storages: the tensors of the same message by address; this one is added.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if kind is numpy.ndarray:
            flags = node.flags
            _TABLE[kind] = _reduce_array
            return node.dtype.char in _NUMBERS and node.dtype.isnative and flags.carray and node.nbytes < limit
        if issubclass(kind, numpy.generic):
            return node.dtype.char in _NUMBERS and kind.__module__ == "numpy"
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and kind is getattr(torch, "Tensor", None)
        and _is_small_tensor(torch, node, min(limit, MOST), storages)
    )


def _is_small_tensor(torch: ModuleType, tensor: Any, limit: int, storages: dict[int, Any]) -> bool:
    if (
        not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.dtype not in _dtypes(torch)
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
        or not tensor.is_contiguous()
    ):
        return False
    size = tensor.nbytes
    if not 0 < size < limit or tensor.untyped_storage().nbytes() != size:
        return False
    return storages.setdefault(tensor.data_ptr(), tensor) is tensor


def dump_small(obj: Any) -> bytes:
    """Pickle what consists of builtin values and of what ``is_small``."""
    file = BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.dispatch_table = _TABLE
    pickler.dump(obj)
    return file.getvalue()


def _reduce_array(array: Any) -> Any:
    # Written from where it is; arrives as a bytearray.
    return make_array, (array.shape, array.dtype.char, pickle.PickleBuffer(array))


def make_array(shape: tuple[int, ...], kind: str, data: bytearray) -> Any:
    """The array, where it arrives."""
    import numpy

    return numpy.ndarray(shape, kind, data)


def _reduce_tensor(tensor: Any) -> Any:
    data = _bytes_at(tensor.data_ptr(), tensor.nbytes)
    return make_tensor, (tuple(tensor.shape), _DTYPES[tensor.dtype], data, tensor.requires_grad)


def make_tensor(shape: tuple[int, ...], kind: str, data: bytes, requires_grad: bool) -> Any:
    """The tensor, where it arrives; in memory of its own."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, kind), device="cpu")
    _copy(tensor.data_ptr(), data, len(data))
    return tensor.requires_grad_() if requires_grad else tensor


_DTYPES: dict[Any, str] = {}
"""Names of the dtypes of torch that are plain numbers; filled when torch is there."""
_TABLE: dict[type, Any] = {}
"""How arrays and tensors are reduced; filled when one is met. Only ever the same is written, so it needs no lock."""


def _dtypes(torch: ModuleType) -> dict[Any, str]:
    if not _DTYPES:
        _TABLE[torch.Tensor] = _reduce_tensor
        names = "float64 float32 float16 bfloat16 complex64 complex128 uint8 int8 int16 int32 int64 bool"
        # Last, since other threads see by it that all is there.
        _DTYPES.update({getattr(torch, name): name for name in names.split()})
    return _DTYPES
