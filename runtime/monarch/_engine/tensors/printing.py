"""How a distributed tensor is shown: shape, dtype, spec, and figures that the ranks compute."""

from __future__ import annotations

from typing import Any

import torch

from monarch._core.text.tables import plain_text
from monarch._engine.tensors.tensor import Tensor, described
from monarch.exceptions import MonarchError

_DIGITS = 6
"""Of values."""
_SMALL = 32
"""Elements up to which the values are shown."""


def describe(tensor: Tensor) -> str:
    """Return a line about a tensor; waits for its values."""
    text = described(tensor)
    if tensor.requires_grad:
        text += ", grad_fn=<...>" if tensor.grad_fn is not None else ", requires_grad=True"
    return f"monarch.Tensor({text}{_figures(tensor)})"


def _figures(tensor: Tensor) -> str:
    with torch.no_grad():
        plain: Any = tensor.detach()
        try:
            if plain.numel() <= _SMALL:
                return f", value={plain_text(plain.full_tensor().tolist(), _DIGITS)}"
            if not plain.is_floating_point():
                return f", min={plain.min().item()}, max={plain.max().item()}"
            std, mean = plain.std().item(), plain.mean().item()
            low, high = plain.min().item(), plain.max().item()
            return f", mean={mean:.4g}, std={std:.4g}, min={low:.4g}, max={high:.4g}"
        except MonarchError as error:
            return f", no value: {str(error).splitlines()[0]}"
