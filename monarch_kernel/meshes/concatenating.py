"""Parts of a value from ranks, joined along their first dimension if that loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from typing import Any


def join(parts: list[Any]) -> Any:
    """Join parts along their first dimension; return a list of them if they are not alike in all else."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return parts
    # Not of subclasses, such as torch.Size or a named tuple, whose items mean something together.
    if type(first) is list:
        return list(chain.from_iterable(parts))
    if type(first) is tuple:
        return tuple(chain.from_iterable(parts))
    numpy, pandas = map(sys.modules.get, ("numpy", "pandas"))
    if is_tensor(first):
        return _join_tensors(parts)
    if numpy is not None and isinstance(first, numpy.ndarray):
        return _join_arrays(numpy, parts)
    if pandas is not None and isinstance(first, (pandas.DataFrame, pandas.Series)):
        return pandas.concat(parts) if _are_alike(parts, _columns) else parts
    return parts


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, of any layout or subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor has rows that can be cut and joined: dense, and no DTensor or other subclass."""
    torch: Any = sys.modules["torch"]
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return (
        known and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested) and tensor.ndim > 0
    )


def _join_tensors(parts: list[Any]) -> Any:
    torch: Any = sys.modules["torch"]
    if not all(map(is_plain, parts)) or not _are_alike(parts, _tensor_rows):
        return parts
    return torch.cat(parts)


def _join_arrays(numpy: Any, parts: list[Any]) -> Any:
    if not parts[0].ndim or not _are_alike(parts, _array_rows):
        return parts
    # The general function drops masks.
    masked = isinstance(parts[0], numpy.ma.MaskedArray)
    return numpy.ma.concatenate(parts) if masked else numpy.concatenate(parts)


def _tensor_rows(tensor: Any) -> Any:
    return tensor.dtype, tensor.device, tensor.shape[1:]


def _array_rows(array: Any) -> Any:
    # Text and bytes may differ in length, since the longest dtype holds them all.
    return array.dtype.kind if array.dtype.kind in "SU" else array.dtype, array.shape[1:]


def _columns(table: Any) -> Any:
    frame = table.ndim == 2
    return (list(table.columns), list(table.dtypes)) if frame else (table.name, table.dtype)


def _are_alike(parts: list[Any], trait: Callable[[Any], Any]) -> bool:
    """Return whether all parts have the same trait."""
    first = trait(parts[0])
    return all(trait(part) == first for part in parts[1:])
