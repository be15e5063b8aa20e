"""Minimum, maximum, mean and the count of NaN of small arrays on the CPU."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from monarch._core.kinds import class_of
from monarch._notebook.who.kinds import is_one

_SMALL = 1 << 20
"""Elements of an array whose statistics are always computed."""


def statistics_text(value: object) -> str:
    """Return the statistics of a small array or tensor on the CPU in a few words; empty for other values."""
    try:
        numbers = _numbers(value)
        return _text(numbers) if numbers is not None else ""
    except Exception:
        # Its library cannot do this for its dtype, or the code changes it meanwhile.
        return ""


def _numbers(value: Any) -> Any:
    """Return the elements in a row, of a type that can be averaged; None for what is not read."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = class_of(value)
    if kind is getattr(numpy, "ndarray", None):
        fits = value.dtype.kind in "iuf" and 0 < value.size <= _SMALL
        return value.astype("float64").reshape(-1) if fits else None
    plain = (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
    if torch is None or kind is type(None) or not is_one(kind, plain):
        return None
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_complex():
        return None
    fits = 0 < prod(value.shape) <= _SMALL and value.dtype is not torch.bool
    return value.detach().to(torch.float64).reshape(-1) if fits else None


def _text(numbers: Any) -> str:
    known = numbers[numbers == numbers]
    nans = len(numbers) - len(known)
    texts = [f"{nans:,} NaN"] if nans else []
    if len(known):
        low, high, mean = float(known.min()), float(known.max()), float(known.mean())
        texts.insert(0, f"min {low:.4g}, max {high:.4g}, mean {mean:.4g}")
    return ", ".join(texts)
