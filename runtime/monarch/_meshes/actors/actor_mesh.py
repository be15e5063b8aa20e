"""Meshes of actors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeGuard

from monarch._actors.endpoint import arity_of, methods_of
from monarch._core.roster import Procs
from monarch._core.shapes.mesh_view import MakesViews
from monarch._core.shapes.region import Region
from monarch._core.shapes.selection import called
from monarch._core.telemetry.event_table import EventTable
from monarch._core.text.tables import html_table, rich_table, text_table
from monarch._groups.groups import HasGroups
from monarch._meshes.actors.adverbs import Endpoint
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.actors.undecorated import Undecorated
from monarch._meshes.async_resource import AsyncResource
from monarch._meshes.procs.events import events_of
from monarch._meshes.verdicts import verdicts_of
from monarch._node.current import is_left_behind, node_for
from monarch._node.future import DoneFuture, Future, node_behind, when_done
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.peers.targets import Targets, TargetShape
from monarch._node.replies.death_errors import died
from monarch._node.replies.gather import Gather
from monarch._node.services.registry import known_service
from monarch._wire import messages as m
from monarch.exceptions import ArgumentError, ShapeError, StoppedError

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

_following = RLock()
"""Keeps threads from replacing a newer shape with an older one."""
SHOWN = 32
"""The most rows that a mesh shows."""


class ActorMesh(HasGroups, MakesViews, AsyncResource, Generic[T]):
    """The actors of one ``spawn``, or a view of them. Its endpoints are attributes, as in ``mesh.train.call(1)``.

    ``ActorMesh[Trainer]`` is the type of a mesh of trainers, for annotations and ``isinstance`` without the bracket.

    A mesh can be sent in messages. The receiver gets a reference to the same actors and does not own them.
    """

    def __init__(self, state: ActorsState, region: Region, node: Node) -> None:
        self._state = state
        # Replaced as a whole by the thread that learns of a resize; any thread reads it.
        self._shape = TargetShape.of(region)
        self._node = node
        # Made by any thread, and again if the shape or version has changed.
        self._targets: Targets | None = None
        self._follows = region == state.region and region == state.procs.region()
        if self._follows:
            state.procs.follow(self)

    @classmethod
    def _received(cls, origin: str, key: str, name: str, actor: type, procs: Procs, region: Region) -> ActorMesh:
        """Return a reference that arrived in a message; raise SerializationError outside its session."""
        node = node_for(f"the actor mesh {name!r}", origin, procs.hosts)
        return cls(ActorsState(key, name, actor, procs, region, False), region, node)

    @property
    # A property, as a resize changes it.
    def _region(self) -> Region:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ranks of this view."""
        return self._shape.region

    @property
    def _view_bytes(self) -> bytes:
        """The packed view for the wire."""
        return self._shape.packed

    def _view(self, region: Region) -> Self:
        return type(self)(self._state, region, self._node)

    def _receivers(self) -> list[str]:
        """Return the proc ids of the members."""
        return [peer.proc for peer in self._members_at().peers]

    # Endpoints

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name.startswith("_") and name in ("_state", "_region", "_node", "_shape")):
            raise AttributeError(name)
        cls = self._state.cls
        if name in methods_of(cls):
            endpoint = Endpoint[..., Any](self, name, arity_of(cls, name))
            self.__dict__[name] = endpoint
            return endpoint
        attribute = inspect.getattr_static(cls, name, None)
        if inspect.isfunction(attribute):
            return Undecorated(self, name, attribute)
        names = ", ".join(sorted(methods_of(cls))) or "none"
        raise ArgumentError(f"{self._name}, a mesh of {cls.__name__}, has no endpoint {name!r}; it has {names}")

    __iter__: Any = None
    """Not iterable: its actors are addressed together."""

    def __getitem__(self, key: object) -> Any:
        """Raise the error that names what selects actors.

        Raises:
            ShapeError: always.
        """
        label = next(iter(self.extent), "procs")
        raise ShapeError(
            f"{self._name}[{key!r}]: a mesh of actors cannot be indexed; {self._name}.slice({label}=0) selects actors, "
            f"{self._name}.ENDPOINT.call().get() calls them, and the ValueMesh of results can be indexed"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *methods_of(self._state.cls)})

    # Members

    @property
    def _name(self) -> str:
        """The name given to ``spawn``."""
        return self._state.name

    @property
    def _called(self) -> str:
        """The name with the selection of this view, such as ``trainers[gpus=1]``."""
        return called(self._name, self._state.region, self._region)

    def _title_of(self, method: str) -> str:
        """Return what errors call a call: the title that its class or its service has for it, or the endpoint."""
        titles: dict[str, str] = getattr(self._state.cls, "monarch_titles", {})
        service = known_service(method)
        return titles.get(method) or (service.title if service is not None else "") or f"{self._called}.{method}()"

    @property
    def _key(self) -> str:
        """The key of the mesh, unique in the session."""
        return self._state.key

    @property
    def _stopped(self) -> str | None:
        """Why the mesh was stopped; None if it was not."""
        return self._state.stopped

    @property
    def initialized(self) -> Future[None]:
        """A future that is done when all actors are constructed; it fails with the error of their constructors.

        Raises:
            StoppedError: this process does not own the mesh.
        """
        future = self._state.initialized
        if future is None:
            raise StoppedError(f"only the owner of {self._name} can wait for its initialization", mesh=self._name)
        return future

    def _members_at(self) -> Targets:
        """Return where the members are: one consistent snapshot for a call."""
        targets, procs = self._targets, self._state.procs
        # A lookup during a change sees the state before it.
        version = procs.version
        if targets is not None and targets.version == version and targets.shape is self._shape:
            return targets
        while True:
            self._check_open()
            if self._follows and self._region != procs.region():
                # Another thread is about to publish the newer one.
                self._follow()
            try:
                targets = self._targets = self._locate(self._shape, version)
                return targets
            except StoppedError:
                if not self._follows or procs.version == version:
                    raise
                # The mesh has just become smaller.
                version = procs.version

    def _locate(self, shape: TargetShape, version: int) -> Targets:
        node, procs, region = self._node, self._state.procs, shape.region
        procs.check(region, self._name)
        return Targets(node.hosts, [node.peers.get(procs.proc(rank)) for rank in region.base_ranks()], shape, version)

    def _member(self, position: int) -> ActorMesh:
        """Return the mesh of one member."""
        return self._member_of(self._shape, position)

    def _member_of(self, shape: TargetShape, position: int) -> ActorMesh:
        """Return the mesh of the member at a position of a shape."""
        return self._view(Region((), shape.region.base_rank(position), (), ()))

    def _follow(self) -> None:
        """Follow a resize; this mesh has actors on all processes."""
        state = self._state
        with _following:
            shape = TargetShape.of(state.procs.region())
            while shape.region is not state.procs.region():
                # A __del__ ran in between and learned of a newer one.
                shape = TargetShape.of(state.procs.region())
            state.region, self._shape = shape.region, shape

    def _check_alive(self, method: str) -> None:
        """Raise if members have died or the mesh was stopped."""
        node = self._node
        self._check_open()
        if self._state.failed:
            # They may be coming back right now.
            self._wait_for_verdict(method)
        if not node.peers.deaths:
            return
        lost = self._lost()
        if lost and self._wait_for_verdict(method):
            lost = self._lost()
        if lost:
            raise died(self._title_of(method), self._name, lost, list(self._region.base_ranks()), None, node.names)

    def _awaits_verdict(self) -> bool:
        """Return whether a call would wait for a verdict on the members."""
        node = self._node
        if node.closed or not verdicts_of(node).is_open(self._state.procs.uid):
            return False
        return bool(self._state.failed) or bool(node.peers.deaths and self._lost())

    def _has_read(self, positions: Iterable[int]) -> None:
        """Note that somebody has read the errors of these members."""
        if self._state.creation is not None:
            self._state.creation.heard([self._region.base_rank(position) for position in positions])

    def _wait_for_verdict(self, method: str) -> bool:
        procs = self._state.procs
        return verdicts_of(self._node).wait(procs.uid, procs.name, self._title_of(method))

    def _check_open(self) -> None:
        node = self._node
        if node.closed:
            raise StoppedError(f"{self._name} can no longer be used: {node.ended}", mesh=self._name)

    def _lost(self) -> dict[int, m.Dead]:
        return {rank: peer.dead for rank, peer in enumerate(self._members_at().peers) if peer.dead is not None}

    # Ending

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """Stop the actors after the messages sent so far, and run their ``__cleanup__``.

        It begins at once; the returned future is done when the actors have ended, and fails if a cleanup failed. After
        3 s the remaining messages are refused, async calls are cancelled, and sync calls and constructors are
        interrupted. ``__cleanup__`` runs when they have ended, ``finally`` included, and has 5 s. An actor that ignores
        two interrupts is given up with an error. `monarch.config` has the bounds.

        Raises:
            StoppedError: this is a view or a reference, or this process is a fork of the owner; only the owner stops
                a mesh, as a whole.
        """
        state = self._state
        if not state.owned or self._region != state.region:
            raise StoppedError(f"{self._name} can only be stopped as a whole, by its owner", mesh=self._name)
        node = self._node
        if is_left_behind(node):
            raise StoppedError(f"{self._name} cannot be stopped here: {node.ended}", mesh=self._name)
        if state.stopping is not None:
            return state.stopping
        state.stopped = reason
        if node.closed:
            # The end of the session has ended its processes.
            ended: Future[None] = DoneFuture(node, f"{self._name}.stop()", None)
            state.stopping = ended
            return ended
        targets = self._members_at()

        def finish(_: Gather[None], __: list[Any]) -> None:
            return None

        extent = targets.shape.region.extent
        gather: Gather[None] = Gather(node, targets.peers, extent, self._name, "stop", finish, patient=True)
        halt = m.encode(m.Halt(node.proc, state.key, gather.port, targets.shape.packed, reason))
        for peer in targets.near:
            peer.send(halt)
        node.hosts.cast(node.proc, targets.far, gather.port, [halt])
        gather.check()
        state.stopping = _Tolerant(gather)
        when_done(state.stopping, lambda _: state.ended.tell())
        return state.stopping

    # Showing

    def events(self) -> EventTable:
        """Return what has happened to the ranks of its processes; see ``ProcMesh.events``."""
        return events_of(self)

    def to_table(self) -> str:
        """Return a text table of the actors and where they run."""
        headers, rows = self._rows()
        return text_table(headers, rows, SHOWN + 1)

    def _rows(self) -> tuple[list[str], list[list[object]]]:
        return member_rows(self._node, self._state.procs, self._region)

    def _title(self) -> str:
        axes = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        return f"{self._state.cls.__name__} mesh {self._called!r} ({axes})" + (" stopped" if self._stopped else "")

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def __rich__(self) -> Any:
        return rich_table(*self._rows(), SHOWN + 1, title=self._title())

    def _repr_html_(self) -> str:
        headers, rows = self._rows()
        return html_table(headers, rows, SHOWN + 1, title=self._title())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorMesh) and self._key == other._key and self._region == other._region

    def __hash__(self) -> int:
        return hash((self._key, self._region))

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._state
        origin = self._node.origin
        return ActorMesh._received, (origin, state.key, state.name, state.cls, state.procs, self._region)


class _Tolerant(Future[None]):
    """The end of a mesh; dead members count as ended."""

    __slots__ = ("_source",)

    def __init__(self, source: Gather[None]) -> None:
        super().__init__(node_behind(source), source.label)
        self._source = source
        when_done(source, lambda _: self._complete())

    def _make(self) -> None:
        from monarch.exceptions import DeviceMeshError

        try:
            self._source.get()
        except DeviceMeshError:
            pass


def member_rows(node: Node, procs: Procs, region: Region) -> tuple[list[str], list[list[object]]]:
    """Return a table of the members of a view: rank, coordinates, host, state."""
    extent = region.extent
    headers = ["rank", *extent.labels, "host", "proc", "state"]
    rows: list[list[object]] = []
    count = region.nelements
    shown = range(count) if count <= SHOWN else [*range(SHOWN // 2), *range(count - SHOWN // 2, count)]
    from monarch._core.shapes.extent import Point

    for rank in shown:
        point = Point(rank, extent)
        proc = procs.proc(region.base_rank(rank))
        peer = node.peers.known.get(proc)
        state = "alive"
        if peer is not None and peer.dead is not None:
            state = "stopped" if peer.dead.expected else peer.dead.reason
        elif (silence := node.find_part(Liveness)) is not None:
            state = silence.text(proc) or state
        host, _, name = proc.partition("/")
        rows.append([rank, *(point[label] for label in extent), host, name, state])
        if count > SHOWN and rank == SHOWN // 2 - 1:
            rows.append([f"… {count - SHOWN} more", *[""] * (len(headers) - 1)])
    return headers, rows


def is_actor_mesh(value: object) -> TypeGuard[ActorMesh[Any]]:
    """Return whether a value is a mesh of actors, of any class."""
    return isinstance(value, ActorMesh)
