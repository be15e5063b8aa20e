"""Optimizers that would be copied without the model whose parameters they have, and so train parameters of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any


def parted(wanted: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that are, or have inside, such an optimizer, each with the reason why it is not copied.

    Args:
        wanted: the variables that are copied together.
        variables: all variables that cells have made on their rank.
    """
    optimizers = {name: found for name, value in wanted.items() if (found := _optimizers_in(value))}
    if not optimizers:
        return {}
    copied = _objects_beside(wanted.values())
    reasons: dict[str, str] = {}
    for name, found in optimizers.items():
        alone = {id(each) for optimizer in found for each in _parameters_of(optimizer)} - copied
        owners = [each for each, value in variables.items() if each not in wanted and alone & _objects_beside([value])]
        if alone and owners:
            reasons[name] = (
                f"its parameters are those of {owners[0]}, which is not copied; copy both together, or run its cell "
                f"again"
            )
    return reasons


def _optimizers_in(value: Any) -> list[Any]:
    kind = _optimizer()
    if kind is None:
        return []
    from monarch._tensors.ddp_compat import objects_in

    return [each for each in objects_in([value]) if issubclass(type(each), kind)]


def _objects_beside(values: Iterable[Any]) -> set[int]:
    """Return the ids of the objects in values, without those that only an optimizer has."""
    from monarch._tensors.ddp_compat import objects_in

    return {id(each) for each in objects_in(values, without=_optimizer())}


def _optimizer() -> Any:
    """Return torch's class of optimizers; None where nobody has imported it."""
    return getattr(sys.modules.get("torch.optim"), "Optimizer", None)


def _parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]
