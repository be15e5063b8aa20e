"""The base class of actors."""

from __future__ import annotations

import inspect
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from monarch._actors.endpoint import methods_of
from monarch.exceptions import ArgumentError

if TYPE_CHECKING:
    from monarch._actors.as_mesh import AsMesh as _Base
else:
    _Base = object


class Actor(_Base):
    """Base of all actors: subclass it, mark methods with ``@endpoint``, and spawn the class on a mesh of procs.

    A class may define ``__cleanup__(self, exc)``, sync or async, which runs when an actor is stopped, with None; and
    ``__supervise__(self, failure)``, which is told of failures in the meshes that the actor spawned, and says by a true
    result that it has dealt with one.
    """

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger that is named after the class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")


def is_async(cls: type) -> bool:
    """Return whether an actor of this class lives on an event loop: if it has an async endpoint."""
    return any(method.is_async for method in methods_of(cls).values())


def check_class(cls: Any) -> None:
    """Refuse what cannot be spawned.

    Raises:
        ArgumentError: it is no class of actors.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Actor)):
        raise ArgumentError(f"spawn needs a subclass of monarch.actor.Actor, not {cls!r}")
