"""Specifications of an actor mesh and of a rank, as their procs receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch._core.shapes.region import Region

if TYPE_CHECKING:
    from monarch._core.roster import Procs


@dataclass
class ActorSpec:
    """An actor mesh to be."""

    name: str
    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    procs: Procs
    region: Region
    """The procs that have one of its actors."""
    owner: str
    """Proc that spawned it."""
    owner_actor: str
    """Key of the actor that did, empty for a program."""
    whole: bool = False
    """Whether it is on all of the procs, and so becomes larger and smaller with them."""


@dataclass
class RankConfig:
    """What a rank is started with: common to all of a mesh."""

    owner: str
    root: str
    procs: Procs
    port: int
    """Where the owner learns that the rank is set up."""
    bootstrap: bytes | None
    """A pickled function to run before any actor is made."""
    owner_actor: str = ""
    addresses: tuple[str, ...] = ()
    """Of each host of the mesh, in order, the address by which the others reach it; empty where it is not known."""
    bound: bool = False
    """Whether the person has said on which cores the processes run."""
    secret: bytes = b""
    """Of the session: who has it may read and write the buffers of its processes."""
