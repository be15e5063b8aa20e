"""The base class of actors."""

from __future__ import annotations

import inspect
import logging
from functools import cached_property
from typing import Any

from monarch._actors.endpoint import methods_of
from monarch.exceptions import ArgumentError


class Actor:
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
    """Whether an actor of this class lives on an event loop: if it has an async endpoint."""
    return any(method.is_async for method in methods_of(cls).values())


def check_class(cls: Any) -> None:
    """Refuses what cannot be spawned.

    Raises:
        ArgumentError: it is no class of actors, or an endpoint has the name of something that each mesh has.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Actor)):
        raise ArgumentError(f"spawn needs a subclass of monarch.actor.Actor, not {cls!r}")
    taken = [name for name in methods_of(cls) if name in mesh_names()]
    if taken:
        raise ArgumentError(
            f"{cls.__name__} has an endpoint named {taken[0]!r}, which every mesh has already; give it another name"
        )


def mesh_names() -> frozenset[str]:
    """What each mesh of actors has, so that no endpoint can be called that."""
    from monarch._meshes.actor_mesh import ActorMesh

    return frozenset(name for name in dir(ActorMesh) if not name.startswith("_"))
