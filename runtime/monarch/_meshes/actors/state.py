"""State that all views of one actor mesh share in a process."""

from __future__ import annotations

from typing import Any

from monarch._core.events import Event
from monarch._core.roster import Procs
from monarch._core.shapes.region import Region
from monarch._meshes.actors.creation import Creation
from monarch._node.future import Future
from monarch._node.rank_config import ActorSpec


class ActorsState:
    """State that all views of one mesh share in this process."""

    __slots__ = (
        "cls",
        "creation",
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
        """Fires when the actors have ended after a stop."""
        self.stopping: Future[None] | None = None
        self.initialized: Future[Any] | None = None
        self.creation: Creation | None = None
        """The construction of the actors; None for a reference, and after a heal has recreated failed ones."""
        self.spec: ActorSpec | None = None
        self.failed: set[int] = set()
        """Base ranks whose actor failed while nobody waited, as far as is known here; a heal recreates them.
        The receiving thread adds and a heal removes, each by one set operation, so there is no lock."""
