"""A value of the program as a tensor, without a copy where its memory can be read as it is."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from monarch._engine.values.arrow import array_of_arrow, is_of_arrow
from monarch.exceptions import ArgumentError


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor with the value of a tensor, an array, or a table.

    Raises:
        ArgumentError: it has no dense numbers.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta:
            kind = "one on the meta device" if value.is_meta else f"one of layout {value.layout}"
            raise ArgumentError(f"distribute: expected a dense tensor, got {kind}")
        if value.is_quantized:
            raise ArgumentError(
                "distribute: expected a tensor of numbers, got a quantized one; use tensor.dequantize()"
            )
        return value
    name = type(value).__name__
    if is_of_arrow(value):
        value = array_of_arrow(value)
    elif hasattr(value, "to_numpy"):
        value = value.to_numpy()
    value = _readable(value)
    try:
        with warnings.catch_warnings():
            # Arrow's memory cannot be written to, and is only read here.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"distribute: expected a tensor or an array of numbers, got {name}: {error}") from error


def _readable(value: Any) -> Any:
    """Return an array as torch takes one: with strides from 0 on, and in the byte order of this machine."""
    if not hasattr(value, "strides") or not hasattr(value, "dtype"):
        return value
    if any(step < 0 for step in value.strides or ()):
        value = value.copy()
    native = value.dtype.newbyteorder("=") if hasattr(value.dtype, "newbyteorder") else value.dtype
    return value if value.dtype == native else value.astype(native)
