"""Optimizers restored from disk: room for their state, before their first step."""

from __future__ import annotations

from typing import Any

import torch


def is_optimizer(value: Any) -> bool:
    """Return whether it is a torch optimizer."""
    return isinstance(value, torch.optim.Optimizer)


def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Make an unused optimizer create its state, in the layout of its parameters, which stay unchanged.

    Raises:
        ValueError: there are gradients, which would be applied.
    """
    groups = optimizer.param_groups
    parameters = [each for group in groups for each in group["params"]]
    if any(each.grad is not None for each in parameters):
        raise ValueError("it has not taken a step yet but has gradients; call its zero_grad(), then restore it")
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
