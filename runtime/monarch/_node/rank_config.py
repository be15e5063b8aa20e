"""Specifications of an actor mesh and of a rank, as their procs receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch._core.shapes.region import Region

if TYPE_CHECKING:
    from monarch._core.roster import Procs


@dataclass
class ActorSpec:
    """The specification of an actor mesh."""

    name: str
    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    procs: Procs
    region: Region
    """The procs with one of its actors."""
    owner: str
    """Proc that spawned it."""
    owner_actor: str
    """Key of the actor that spawned it; empty for a program."""
    creator: Any = None
    """The identity of that actor; None for a program."""
    whole: bool = False
    """Whether it is on all procs and so is resized with them."""
    is_added: bool = False
    """Whether this actor joins others of the mesh that exist already."""


@dataclass
class RankConfig:
    """The configuration of the ranks of a mesh."""

    owner: str
    root: str
    procs: Procs
    port: int
    """The owner's port for news that the rank is set up."""
    bootstrap: bytes | None
    """A pickled function to run before any actor is made."""
    owner_actor: str = ""
    addresses: tuple[str, ...] = ()
    """The address of each host of the mesh, in order; empty if unknown."""
    bound: bool = False
    """Whether the user has set the cores of the processes."""
    given: frozenset[str] = frozenset()
    """The environment variables that the user has set."""
    secret: bytes = b""
    """The session's secret: its holders may read and write the buffers of its processes."""
