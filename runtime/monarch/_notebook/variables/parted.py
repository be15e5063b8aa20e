"""Optimizers without the model whose parameters they have, and the like: a copy of one alone would be trained apart."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from monarch._notebook.variables.holding import holding
from monarch._notebook.variables.rebound import is_rebound
from monarch._python.objects import Search, instances_of


def parted(wanted: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that are, or have inside, such an optimizer, each with the reason why it is not copied.

    Args:
        wanted: the variables that are copied together.
        variables: all variables that cells have made on their rank.
    """
    kind = _optimizer()
    if kind is None:
        return {}
    optimizers = holding(wanted, instances_of(kind, lambda each: "param_groups" in vars(each)))
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


def left_behind(wanted: Mapping[str, Any], variables: Mapping[str, Any], are_named: bool) -> dict[str, str]:
    """Return the models and optimizers that other variables have too, which are not copied, each with the reason.

    Those of the receivers would keep the old ones.

    Args:
        wanted: the variables that are copied together.
        variables: all variables that cells have made on their rank.
        are_named: whether the program has named the copied ones. Else the others cannot be copied, and only optimizers
            of theirs matter.
    """
    torch, kind = sys.modules.get("torch"), _optimizer()
    if torch is None or kind is None:
        return {}
    modules = {name: value for name, value in wanted.items() if isinstance(value, torch.nn.Module)}
    own = holding(wanted, instances_of(kind, lambda each: "param_groups" in vars(each)))
    for name, value in modules.items():
        own.setdefault(name, []).extend([value, *list(value.parameters())[:1]])
    others = {name: value for name, value in variables.items() if name not in wanted}
    if are_named:
        # Functions, classes and objects of cells get the new values.
        others = {name: value for name, value in others.items() if not is_rebound(value)}
    else:
        others = {name: value for name, value in others.items() if isinstance(value, kind)}
    reasons: dict[str, str] = {}
    for name, known in own.items():
        keepers = list(holding(others, known))
        if keepers:
            reasons[name] = f"{keepers[0]} has it too, and is not copied; copy both together"
    return reasons


def _objects_beside(values: Iterable[Any]) -> set[int]:
    """Return the ids of the objects in values, without those that only an optimizer has."""
    return {id(each) for each in Search(without=_optimizer()).objects_in(values)}


def _optimizer() -> Any:
    """Return torch's class of optimizers; None where nobody has imported it."""
    return getattr(sys.modules.get("torch.optim"), "Optimizer", None)


def _parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]
