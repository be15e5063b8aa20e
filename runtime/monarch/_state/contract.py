"""The methods that give and take the state of an actor: those of a torch module, or those of pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._core.kinds import class_of
from monarch.exceptions import ArgumentError

Pair = tuple[str, str]
"""The method that returns a state, and the one that takes it."""
DICTS: Pair = ("state_dict", "load_state_dict")
PICKLES: Pair = ("__getstate__", "__setstate__")
BOTH = "state_dict and load_state_dict, or __getstate__ and __setstate__"


def pair_of(cls: type, *order: Pair) -> Pair | None:
    """Return the first pair of methods that a class defines; None if it defines no pair.

    Python gives each class a ``__getstate__``, which does not count.
    """
    return next((pair for pair in order if all(_defines(cls, name) for name in pair)), None)


def copied_by(cls: type) -> Pair | None:
    """Return the methods by which the state of an actor goes to another process."""
    return pair_of(cls, PICKLES, DICTS)


def saved_by(cls: type, state: str, load: str) -> Pair:
    """Return the methods by which the state of an actor is saved: the given ones, or pickle's if it lacks the usual."""
    usual = (state, load) == DICTS and not _defines(cls, state)
    return (pair_of(cls, PICKLES) if usual else None) or (state, load)


def method_of(cls: type[Any], name: str) -> Callable[..., Any]:
    """Return a method of an actor class, endpoint or not; raise ArgumentError if it does not exist."""
    found = getattr(cls, name, None)
    found = getattr(found, "method", found)
    if not callable(found):
        hint = f"; define {BOTH}" if name in DICTS else ""
        raise ArgumentError(f"{cls.__name__} has no method {name!r}{hint}")
    return found


def call_method(actor: Any, name: str, *args: Any) -> Any:
    """Call a method of an actor, endpoint or not."""
    return method_of(class_of(actor), name)(actor, *args)


def _defines(cls: type, name: str) -> bool:
    return any(name in each.__dict__ for each in cls.__mro__ if each is not object)
