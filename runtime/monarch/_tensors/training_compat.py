"""The private names of torch's parameters, optimizers and gradient scalers that the package uses."""

from __future__ import annotations

import sys
from typing import Any

from monarch._core.kinds import class_of

_OF_RANK = {"step", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called"}
"""Attributes of an optimizer that torch makes on each rank."""


def hooks_of(parameter: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks of a parameter: those called with its gradient, and those called after that was accumulated."""
    before: dict[int, Any] | None = parameter._backward_hooks
    after: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list((before or {}).values()), list((after or {}).values())


def attributes_of(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that torch leaves out as it pickles one: hooks, and those of its class."""
    base: Any = sys.modules["torch.optim"].Optimizer
    kind: Any = class_of(optimizer)
    if kind.__getstate__ is not base.__getstate__:
        return {}
    own: dict[str, Any] = optimizer.__dict__
    left_out = own.keys() - {*optimizer.__getstate__()} - _OF_RANK
    # Torch makes the empty dicts. Of others, such as tensors, nobody asks whether they are true.
    return {key: own[key] for key in sorted(left_out) if not isinstance(own[key], dict) or own[key]}


def is_scaling(scaler: Any) -> bool:
    """Return whether a gradient scaler is enabled; one whose constructor was broken off is not."""
    return bool(getattr(scaler, "_enabled", False)) and hasattr(scaler, "_growth_tracker")
