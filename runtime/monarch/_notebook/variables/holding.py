"""Which variables have modules in DistributedDataParallel, or other objects of few kinds, inside."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from monarch._python.objects import Search


def ddp_modules_in(values: Iterable[Any]) -> list[Any]:
    """Return the modules in DistributedDataParallel among values, and inside; see ``ddp_compat.ddp_modules_in``."""
    if not ddp_modules_here():
        return []
    from monarch._tensors.ddp_compat import ddp_modules_in

    return ddp_modules_in(values)


def ddp_modules_here() -> list[Any]:
    """Return the modules in DistributedDataParallel of this process."""
    # Where nobody has imported it, there are none.
    if "torch.nn.parallel.distributed" not in sys.modules:
        return []
    from monarch._tensors.ddp_compat import ddp_modules

    return ddp_modules()


def holding(variables: Mapping[str, Any], known: Iterable[Any], once: bool = False) -> dict[str, list[Any]]:
    """Return the variables that have some objects inside, with these, as far as a search goes.

    Args:
        variables: the variables.
        known: the objects.
        once: whether to return each object with one variable only: that which it is, or the first.
    """
    left = {id(each): each for each in known}
    found: dict[str, list[Any]] = {}
    # First those that are such an object.
    order = sorted(variables, key=lambda name: id(variables[name]) not in left)
    # Objects that have none of them inside.
    barren = set[int]()
    for name in order:
        search, inside = Search(seen={*barren}), dict[int, Any]()
        for each in search.objects_in([variables[name]]) if left else ():
            if id(each) in left:
                inside[id(each)] = each
                if len(inside) == len(left):
                    break
        if inside:
            found[name] = [*inside.values()]
        elif search.is_whole:
            barren = search.seen
        if once:
            left = {key: each for key, each in left.items() if key not in inside}
    return found


def with_attributes(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables, with the attributes of the classes that cells define in place of these."""
    return {
        name: list(vars(value).values()) if isinstance(value, type) and value.__module__ == "__main__" else value
        for name, value in variables.items()
    }
