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
    """Base of all actors: subclass it, mark methods with ``@endpoint``, and spawn the class on a process mesh.

    A class may define ``__cleanup__(self, exc)``, sync or async, which is called when an actor is stopped, with the
    error that it has failed with, or None; and ``__supervise__(self, failure)``, which is called for failures in
    meshes that the actor spawned, and returns True if it has handled one.
    """

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger named after the class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")

    # The results are Any, since both may also be async.
    def __supervise__(self, failure: Any, /) -> Any:
        """Handle nothing; for classes that call ``super().__supervise__(failure)``."""
        return False

    def __cleanup__(self, exc: Any, /) -> Any:
        """Do nothing; for classes that call ``super().__cleanup__(exc)``."""
        return None


def has_own(instance: object, hook: str) -> bool:
    """Return whether the class of an actor, or a base of it, defines ``__supervise__`` or ``__cleanup__`` itself."""
    # Look at the class, since a user's __getattr__ may block.
    return any(hook in vars(base) for base in type(instance).__mro__ if base is not Actor)


def is_async(cls: type) -> bool:
    """Return whether actors of this class run on an event loop: the class has an async endpoint."""
    return any(method.is_async for method in methods_of(cls).values())


def check_class(cls: Any) -> None:
    """Refuse classes that cannot be spawned.

    Raises:
        ArgumentError: ``cls`` is not a subclass of Actor.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Actor)):
        raise ArgumentError(f"spawn: expected a subclass of monarch.actor.Actor, got {cls!r}")
