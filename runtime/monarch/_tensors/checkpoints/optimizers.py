"""Optimizers that take a state from disk: room for it, where they have made none."""

from __future__ import annotations

from typing import Any

import torch


def is_optimizer(value: Any) -> bool:
    """Whether it is one of torch's."""
    return isinstance(value, torch.optim.Optimizer)


def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer that was never used make its state, in the layout of its parameters, which stay as they are.

    Raises:
        ValueError: there are gradients, which would count.
    """
    groups = optimizer.param_groups
    parameters = [each for group in groups for each in group["params"]]
    if any(each.grad is not None for each in parameters):
        raise ValueError("it has made no step yet, and there are gradients; call its zero_grad(), and restore it then")
    rates = [group.get("lr") for group in groups]
    try:
        for each in parameters:
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for each in parameters:
            each.grad = None
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
