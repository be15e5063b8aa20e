"""Services: functions that processes of a session call in each other, by names that survive moves of files.

A service is a function with a declaration: ``@service("groups.spoil", "quick")``. Callers pass the function itself, so
type checkers check its arguments and searches find its uses; its name goes over the wire. The first part of the name
tells the module (``monarch/_services.py``), which a process imports on first use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from monarch.exceptions import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["quick", "threaded", "probe", "actor", "local"]


class Service(NamedTuple):
    """A function that processes call in each other."""

    name: str
    function: Callable[..., Any]
    kind: Kind
    title: str = ""
    """Name of a call of it in errors; empty for its own name."""


class ServiceRequest(NamedTuple):
    """A service with its arguments."""

    name: str
    args: tuple[Any, ...]


_services: dict[str, Service] = {}
"""By name. Written as modules are imported, and only added to."""
_names: dict[Callable[..., Any], str] = {}
"""By function; written with ``_services``."""
_modules: dict[str, str] = {}
"""By the first part of a name, the module. Written as ``monarch`` is imported."""


def service(name: str, kind: Kind, title: str = "") -> Callable[[F], F]:
    """Declare a function as a service.

    Args:
        name: ``<where>.<function>``; ``monarch/_services.py`` has the first part.
        kind: ``quick`` runs in the receiving thread: it returns at once, does not wait or run user code, and neither
            takes nor returns objects of user classes. ``threaded`` runs in a thread of its module and may do all of
            that; services of one module run in the order of their requests. ``probe`` is the same,
            but only reads, so later ones of its module overtake one that is stuck in user code. ``actor`` runs in an
            actor, in its turn, with the actor as first argument. ``local`` is called only within the process, by
            rooms below this one.
        title: name of a call of it in errors; empty for its own name.
    """

    def declare(function: F) -> F:
        _services[name] = Service(name, function, kind, title)
        _names[function] = name
        return function

    return declare


def declared(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a service by its signature, for callers in rooms below the function's."""

    def declare(signature: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(signature)
        def call(*args: P.args, **named: P.kwargs) -> R:
            return service_of(name).function(*args, **named)

        _names[call] = name
        return call

    return declare


def request(function: Callable[P, Any], *args: P.args, **named: P.kwargs) -> ServiceRequest:
    """Return a service with its arguments, ready to be sent."""
    if named:
        raise TypeError(f"{name_of(function)}: pass the arguments of a service by position")
    return ServiceRequest(name_of(function), args)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function that is declared as a service."""
    try:
        return _names[function]
    except KeyError:
        raise TypeError(f"{function!r} is not declared as a service") from None


def set_modules(modules: Mapping[str, str]) -> None:
    """Set the modules of services, by the first part of their names."""
    _modules.update(modules)


def known_service(name: str) -> Service | None:
    """Return the service of a name; None if its module is not imported."""
    return _services.get(name)


def service_of(name: str) -> Service:
    """Return the service of a name, importing its module; not in the receiving thread.

    Raises:
        ArgumentError: no service has this name.
    """
    found = _services.get(name)
    if found is None:
        module = _modules.get(name.partition(".")[0])
        if module is not None:
            importlib.import_module(module)
            found = _services.get(name)
    if found is None:
        raise ArgumentError(f"{name!r} is not a service of Monarch")
    return found


def function_of(name: str, kind: Kind = "actor") -> Callable[..., Any]:
    """Return the function of a service of one kind; raise ArgumentError for other names."""
    found = service_of(name)
    if found.kind != kind:
        raise ArgumentError(f"{name!r} is a service of kind {found.kind!r}, not {kind!r}")
    return found.function
