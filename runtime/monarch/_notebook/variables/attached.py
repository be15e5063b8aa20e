"""The gradients, hooks and own attributes that torch leaves out as it pickles a parameter or an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from monarch._python.objects import Search


class Attached(NamedTuple):
    """Those of one parameter or optimizer."""

    owner: Any
    grad: Any = None
    hooks: tuple[Any, ...] = ()
    """Called with the gradient."""
    hooks_after: tuple[Any, ...] = ()
    """Called after the gradient was accumulated."""
    attributes: dict[str, Any] | None = None
    """Of an optimizer: hooks around its steps, and attributes of its class."""


def attached_to(values: Iterable[Any], why_not: Callable[[Any], str]) -> list[Attached]:
    """Return what belongs to the parameters and optimizers inside of values.

    Args:
        values: the values.
        why_not: returns why a value cannot be pickled; empty if it can.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    from monarch._tensors.training_compat import attributes_of, hooks_of

    optimizer: Any = getattr(sys.modules.get("torch.optim"), "Optimizer", ())
    found: list[Attached] = []
    for each in Search().objects_in(values):
        if isinstance(each, torch.nn.Parameter):
            before, after = (tuple(hook for hook in some if not why_not(hook)) for some in hooks_of(each))
            if each.grad is not None or before or after:
                found.append(Attached(each, each.grad, before, after))
        elif isinstance(each, optimizer):
            own = {key: value for key, value in attributes_of(each).items() if not why_not(value)}
            if own:
                found.append(Attached(each, attributes=own))
    return found


def attach(found: Iterable[Attached]) -> None:
    """Give copies what belongs to them."""
    for each in found:
        if each.attributes is not None:
            each.owner.__dict__.update(each.attributes)
            continue
        each.owner.grad = each.grad
        # One may have been frozen since.
        requires = each.owner.requires_grad
        each.owner.requires_grad_(True)
        for hook in each.hooks:
            each.owner.register_hook(hook)
        for hook in each.hooks_after:
            each.owner.register_post_accumulate_grad_hook(hook)
        each.owner.requires_grad_(requires)
