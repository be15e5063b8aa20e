"""Ranks that have replaced others, whose process groups the others had before: they begin with the state of these.

The constructor of a module in DDP is a collective of all ranks. That of an actor which a heal makes again runs on the
new rank alone, so it leaves these collectives out, and all ranks begin the module afresh in the next step instead. The
state comes from a rank that had it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch._tensors import ddp_compat
from monarch._tensors.torch_compat import default_group

joins: Callable[[], bool] = bool
"""Returns whether this thread runs the constructor of an actor that joins others of its mesh. Replaced once."""
# Written as a generation forms, before the code that asked for its groups goes on.
_first = 0
"""The first rank that had the default group before."""
_is_new = False
"""Whether this rank had none while others had."""


def is_of_earlier() -> bool:
    """Return whether this rank has the state of earlier steps; a new one has once its modules have begun."""
    return not _is_new or ddp_compat.have_begun()


def note(earlier: Sequence[int], rank: int, size: int) -> None:
    """Note which ranks had the default group before, as this rank forms it.

    Args:
        earlier: those ranks, ascending; none for a first group.
        rank: this rank.
        size: the number of ranks.
    """
    global _first, _is_new
    _first, _is_new = (earlier[0], rank not in earlier) if earlier else (0, False)
    ddp_compat.use(_source, _runs_alone, 0 < len(earlier) < size)


def _runs_alone(group: Any) -> bool:
    """Return whether this thread constructs a module with a group on this rank alone."""
    return group is default_group() and joins() and not is_of_earlier()


def _source(group: Any) -> int:
    """Return the rank in a group from which a module that begins afresh gets its state."""
    return _first if group is default_group() else 0
