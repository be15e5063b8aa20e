"""The identity of an actor's creator: the actor, or the program, that spawned it."""

from __future__ import annotations

from dataclasses import dataclass

from monarch._actors.running import ActorLike
from monarch._core.shapes.extent import Extent, Point


@dataclass(frozen=True)
class Creator:
    """An actor, or the program, as the creator of others.

    Attributes:
        name: name of its mesh; ``root`` for the program.
        class_name: module and name of its class.
        actor_id: key of its mesh and proc id.
        proc_id: proc id.
        rank: its Point in the spawned mesh.
        creator: its own creator; None for the program.
    """

    name: str
    class_name: str
    actor_id: str
    proc_id: str
    rank: Point
    creator: Creator | None = None

    def __repr__(self) -> str:
        return path_of(self.creator, self.class_name, self.name, self.rank)


def root(proc_id: str) -> Creator:
    """Return the program as a creator."""
    return Creator("root", "root", f"root@{proc_id}", proc_id, Point(0, Extent((), ())))


def path_of(creator: Creator | None, class_name: str, name: str, rank: Point) -> str:
    """Return an actor with its creators, outermost first: ``<root>.<module.Trainer trainers{'gpus': 0/2}>``."""
    if creator is None:
        return "<root>"
    return f"{creator!r}.<{class_name} {name}{rank if len(rank) else ''}>"


def creator_of(mailbox: ActorLike) -> Creator | None:
    """Return an actor as a creator; None before it is constructed."""
    spec = mailbox.spec
    if spec is None:
        return None
    place = Point(spec.region.place_of(mailbox.rank), spec.region.extent)
    proc = mailbox.node.proc
    above: Creator = spec.creator or root(spec.owner)
    return Creator(spec.name, class_name_of(spec.cls), f"{mailbox.key}@{proc}", proc, place, above)


def class_name_of(cls: type) -> str:
    """Return the module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
