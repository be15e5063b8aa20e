"""What all views of one mesh of actors in a process share."""

from __future__ import annotations

from typing import Any

from monarch._core.events import Event
from monarch._core.roster import Procs
from monarch._core.shapes.region import Region
from monarch._meshes.actors.birth import Birth
from monarch._node.future import Future
from monarch._node.rank_config import ActorSpec


class ActorsState:
    """What all views of one mesh in this process share."""

    __slots__ = (
        "birth",
        "cls",
        "ended",
        "failed",
        "initialized",
        "key",
        "name",
        "owned",
        "procs",
        "region",
        "spec",
        "stopped",
        "stopping",
    )

    def __init__(self, key: str, name: str, cls: type, procs: Procs, region: Region, owned: bool) -> None:
        self.key = key
        self.name = name
        self.cls = cls
        self.procs = procs
        self.region = region
        self.owned = owned
        self.stopped: str | None = None
        self.ended: Event[[]] = Event()
        """Told when its actors have ended after a stop."""
        self.stopping: Future[None] | None = None
        self.initialized: Future[Any] | None = None
        self.birth: Birth | None = None
        """Its making; None for a reference, and once a heal has made again what had failed."""
        self.spec: ActorSpec | None = None
        self.failed: set[int] = set()
        """Base ranks whose actor has failed where nobody waited, as far as is known here, and that a heal makes again.
        The receiving thread adds to it, a heal takes from it: each by one operation of set, so there is no lock."""
