"""The variables that cells have defined on a rank, as a service that answers while a cell runs."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from monarch._node.services.registry import service
from monarch._notebook.names.user_names import user_names
from monarch._notebook.who.contents import mark_of
from monarch._notebook.who.describing import describe, kind_of
from monarch._notebook.who.sizes import Size, bytes_of

MOST = 200
"""Variables of an answer, which are the first ones by name."""


class Variable(NamedTuple):
    """A variable of a rank."""

    name: str
    kind: str
    text: str
    """Its value in a few words."""
    size: int
    complete: bool
    """Whether ``size`` counts all of its parts."""
    mark: str
    """Equal for values of equal contents; empty if these were not read."""


class RankListing(NamedTuple):
    """The answer of a rank."""

    total: int
    """How many variables match."""
    variables: list[Variable]


@service("who.variables_here", "probe")
def variables_here(patterns: list[str]) -> RankListing:
    """Service: return the first variables that match one of some patterns, or all of them."""
    return listing(sys.modules["__main__"].__dict__, patterns)


def listing(variables: dict[str, Any], patterns: list[str]) -> RankListing:
    """Return the variables of a namespace."""
    matching = [name for name in user_names(variables) if not patterns or _fits(name, patterns)]
    # A cell may have deleted one by now.
    found = [(name, variables[name]) for name in matching[:MOST] if name in variables]
    return RankListing(len(matching), [variable_of(name, value) for name, value in found])


def _fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def variable_of(name: str, value: object) -> Variable:
    """Return what to show of a variable."""
    kind = kind_of(value)
    try:
        size = bytes_of(value)
        return Variable(name, kind, describe(value), size.bytes, size.complete, mark_of(value))
    except Exception as error:
        # Any object may refuse, and a container may change while it is read.
        return Variable(name, kind, f"not readable now: {type(error).__name__}", *Size(0, False), "")
