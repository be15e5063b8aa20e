"""The state dict that every system copies: a model of 25 layers, 50 tensors of 256 MB together."""

from __future__ import annotations

from typing import Any

_LAYERS, _WIDTH = 25, 1638
SIZE = _LAYERS * (_WIDTH + 1) * _WIDTH * 4
"""Bytes."""


def make(value: float) -> dict[str, Any]:
    """Return it, with the same number everywhere."""
    import torch

    torch.set_num_threads(1)
    state: dict[str, Any] = {}
    for layer in range(_LAYERS):
        state[f"layers.{layer}.weight"] = torch.full((_WIDTH, _WIDTH), value)
        state[f"layers.{layer}.bias"] = torch.full((_WIDTH,), value)
    return state


def fill(state: dict[str, Any], value: float) -> None:
    """Write another number everywhere."""
    for tensor in state.values():
        tensor.fill_(value)


def check(state: dict[str, Any], value: float) -> bool:
    """Return whether each tensor has this number at its beginning, middle and end."""
    ends = [tensor.view(-1)[index] for tensor in state.values() for index in (0, tensor.numel() // 2, -1)]
    return all(float(end) == value for end in ends)


class Weights:
    """An actor that has the state; the same plain class in every system."""

    def __init__(self) -> None:
        self.state = make(0.0)

    def fill(self, value: float) -> None:
        fill(self.state, value)

    def check(self, value: float) -> bool:
        return check(self.state, value)
