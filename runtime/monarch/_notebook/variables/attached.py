"""The gradients, hooks and own attributes that torch leaves out as it pickles a parameter or an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

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
        # Not isinstance: objects tell their class.
        if issubclass(type(each), torch.nn.Parameter):
            before, after = (tuple(hook for hook in some if not why_not(hook)) for some in hooks_of(each))
            if each.grad is not None or before or after:
                found.append(Attached(each, each.grad, before, after))
        elif issubclass(type(each), optimizer):
            own = {key: value for key, value in attributes_of(each).items() if not why_not(value)}
            if own:
                found.append(Attached(each, attributes=own))
    return found


def attach(found: Iterable[Attached], here: Callable[[Any], Any]) -> None:
    """Give copies their gradients, hooks and attributes.

    Args:
        found: those of each copy.
        here: returns a function of a cell with the variables of this rank, and other values as they are.
    """
    for each in found:
        for key, value in (each.attributes or {}).items():
            hooks = cast("dict[Any, Any]", value) if isinstance(value, dict) else {}
            for number in hooks:
                # In place, so that the dict stays of its class.
                hooks[number] = here(hooks[number])
            each.owner.__dict__[key] = here(value)
        if each.attributes is not None:
            continue
        each.owner.grad = each.grad
        # One may have been frozen since.
        requires = each.owner.requires_grad
        each.owner.requires_grad_(True)
        for hook in each.hooks:
            each.owner.register_hook(here(hook))
        for hook in each.hooks_after:
            each.owner.register_post_accumulate_grad_hook(here(hook))
        each.owner.requires_grad_(requires)
