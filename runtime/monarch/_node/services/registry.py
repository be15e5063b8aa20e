"""Functions of this package that other processes of the session call by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

from monarch.exceptions import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["quick", "threaded"]


class Service(NamedTuple):
    """A function that processes ask each other for, whatever their actors do."""

    function: Callable[..., Any]
    kind: Kind


_services: dict[str, Service] = {}
"""By name: ``<module>:<function>``. Written as modules are imported, and only added to."""


def service(kind: Kind) -> Callable[[F], F]:
    """Declare a function as a service, which other processes may ask for.

    Args:
        kind: ``quick`` runs in the thread that receives: it returns at once, waits for nothing, runs no code of the
            user, and neither gets nor returns objects of the user's classes. ``threaded`` runs in a thread of its
            module, and may do all of that. Services of one module run in the order in which they were asked for.
    """

    def declare(function: F) -> F:
        _services[f"{function.__module__}:{function.__qualname__}"] = Service(function, kind)
        return function

    return declare


def known_service(name: str) -> Service | None:
    """The service of a name, if its module is imported."""
    return _services.get(name)


def service_of(name: str) -> Service:
    """The service of a name, whose module is imported if it is not; not in the thread that receives.

    Raises:
        ArgumentError: there is no such service.
    """
    if name not in _services:
        function_of(name)
    try:
        return _services[name]
    except KeyError:
        raise ArgumentError(f"{name!r} is not a service of Monarch: it lacks the decorator @service") from None


@functools.lru_cache(maxsize=64)
def function_of(name: str) -> Callable[..., Any]:
    """The function of a name as ``monarch.<module>:<function>``; ArgumentError for any other."""
    module, _, function = name.partition(":")
    if not module.startswith("monarch.") or not function:
        raise ArgumentError(f"{name!r} is no function of Monarch")
    return getattr(importlib.import_module(module), function)
