"""Constants of torch that do not know their module, like ``torch.channels_last``, are pickled by their names in torch.

By themselves they are pickled as attributes of the first module that has them, and that may be one of the program: any
that has imported torch.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping
from typing import Any

_KINDS = ("memory_format", "qscheme")
"""Their types in torch."""


def reduce_constant(constant: Any) -> tuple[Any, ...]:
    """Return how a pickle makes a constant."""
    return make_constant, (str(constant).removeprefix("torch."),)


def make_constant(name: str) -> Any:
    """Return a constant of torch."""
    import torch

    return getattr(torch, name)


class DispatchTable(dict[Any, Callable[[Any], Any]]):
    """The dispatch table of a pickler: given reducers, those of other tables and of plain pickle, and constants.

    Args:
        given: the reducers.
        others: tables to which modules may add at any time.
    """

    def __init__(self, given: Mapping[Any, Callable[[Any], Any]], *others: Mapping[Any, Callable[[Any], Any]]) -> None:
        super().__init__(given)
        self._others = (*others, copyreg.dispatch_table)

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        for each in self._others:
            reduce = each.get(kind)
            if reduce is not None:
                return reduce
        # By name first: torch may not be loaded, and then nothing has its types.
        if kind.__name__ in _KINDS and kind is getattr(sys.modules.get("torch"), kind.__name__, None):
            return reduce_constant
        raise KeyError(kind)
