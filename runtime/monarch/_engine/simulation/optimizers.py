"""Whose memory it is: what an optimizer has tells the owners of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def name_parameters(optimizer: Any, name: Callable[[Any, str], None]) -> None:
    """Give the parameters of an optimizer, and their gradients, their owners."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            name(each, "parameters")
            name(each.grad, "gradients")


def name_state(optimizer: Any, name: Callable[[Any, str], None]) -> None:
    """Give the state of an optimizer its owner."""
    for state in optimizer.state.values():
        for each in state.values():
            name(each, "optimizer")
