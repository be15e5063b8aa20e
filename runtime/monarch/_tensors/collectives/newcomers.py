"""Ranks that have replaced others, whose process groups the others had before: they begin with the state of these.

The constructor of a module in DDP is a collective of all ranks. That of an actor which a heal makes again runs on one
rank alone, so it leaves these collectives out, and all ranks begin the module afresh in the next step instead. The
state comes from a rank that had it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch._tensors import ddp_afresh, ddp_compat
from monarch._tensors.torch_compat import default_group

joins: Callable[[], bool] = bool
"""Returns whether this thread runs the constructor of an actor that joins others of its mesh. Replaced once."""


class _Known(NamedTuple):
    """The ranks that had the default group before the present generation."""

    first: int = 0
    """The first rank that had it."""
    any: bool = False
    """Whether a rank had it."""
    is_new: bool = False
    """Whether this rank had none while others had."""


_known = _Known()
"""Replaced as a whole as a generation forms, before the code that asked for its groups goes on."""


def is_of_earlier() -> bool:
    """Return whether this rank has the state of earlier steps; a new one has once its modules have begun."""
    return not ddp_afresh.is_any_alone() and (not _known.is_new or ddp_afresh.have_begun())


def note(earlier: Sequence[int], rank: int, size: int) -> None:
    """Note which ranks had the default group before, as this rank forms it.

    Args:
        earlier: those ranks, ascending; none for a first group.
        rank: this rank.
        size: the number of ranks.
    """
    global _known
    _known = _Known(earlier[0], True, rank not in earlier) if earlier else _Known()
    now = ddp_afresh.Generation(_source, 0 < len(earlier) < size, _known.is_new)
    ddp_afresh.use(now, _runs_alone)


def _runs_alone(group: Any) -> bool:
    """Return whether this thread constructs a module with a group on this rank alone."""
    # Without earlier ranks and modules, all ranks are new and construct theirs together.
    return group is default_group() and joins() and (_known.any or ddp_compat.has_constructed())


def _source(group: Any) -> int:
    """Return the rank in a group from which a module that begins afresh gets its state."""
    return _known.first if group is default_group() else 0
