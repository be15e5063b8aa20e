"""Meshes of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from monarch._actors.actor import Actor, check_class
from monarch._actors.endpoint import init_arity_of
from monarch._core.kinds import is_a
from monarch._core.roster import Procs, Roster
from monarch._core.shapes.mesh_view import MakesViews
from monarch._core.shapes.region import Region
from monarch._core.shapes.selection import called
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._core.telemetry.event_table import EventTable
from monarch._core.text.advice import advice
from monarch._core.text.tables import html_table, rich_table, text_table
from monarch._groups.groups import HasGroups
from monarch._meshes.actors.actor_mesh import SHOWN, member_rows
from monarch._meshes.actors.spawning import check_names, spawn_actors
from monarch._meshes.async_resource import AsyncResource
from monarch._meshes.procs.agents import agents_of
from monarch._meshes.procs.events import events_of
from monarch._meshes.procs.pausing import HasPauses
from monarch._meshes.procs.reasons import HasReasons
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.procs.stopping import begin_stop
from monarch._meshes.procs.tensors import TensorMethods
from monarch._meshes.procs.variables import HasVariables
from monarch._meshes.verdicts import verdicts_of
from monarch._node.current import current_node, is_left_behind, node_for, open_node
from monarch._node.future import Future, Promise, judging
from monarch._node.node import Node
from monarch._node.replies.death_errors import died
from monarch._node.services.frame import send_to_all
from monarch._wire import messages as m
from monarch.config import STOP_REACT
from monarch.exceptions import ShapeError, StoppedError

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch._meshes.mesh_like import ResizableHosts

A = TypeVar("A", bound=Actor)


class ProcMesh(HasGroups, HasVariables, HasPauses, HasReasons, TensorMethods, MakesViews, AsyncResource):
    """The processes of one ``spawn_procs``, or a view of them, on which actors are spawned."""

    host_mesh: Any
    """The HostMesh of the processes; a property that host_mesh.py adds, since it imports this file."""

    def __init__(self, state: ProcsState, region: Region, node: Node) -> None:
        self._state = state
        self._region = region
        self._node = node
        self._kept: Any = None
        """The events of an ended mesh, which end with the last mesh on all of its processes."""
        if region == state.procs.region():
            state.procs.follow(self)

    def _follow(self) -> None:
        """Follow a resize; this view has all processes."""
        self._region = self._state.procs.region()

    @classmethod
    def refer(cls, procs: Procs, region: Region, node: Node | None = None) -> ProcMesh:
        """Return a reference to processes with another owner."""
        return cls(ProcsState(procs, False), region, node or current_node())

    @classmethod
    def _received(cls, origin: str, procs: Procs, region: Region) -> ProcMesh:
        """Return a reference that arrived in a message; raise SerializationError outside its session."""
        return cls.refer(procs, region, node_for(f"the proc mesh {procs.name!r}", origin, procs.hosts))

    def _view(self, region: Region) -> Self:
        return type(self)(self._state, region, self._node)

    @property
    def name(self) -> str:
        """The name of the mesh, for messages and tables."""
        return self._state.procs.name

    def role(self, name: str) -> ProcMesh:
        """Return the processes with a role of ``spawn_procs(roles=...)``.

        Raises:
            ShapeError: the mesh has no role of this name, or this is a slice or has other axes.
        """
        state = self._state
        if name not in state.roles:
            raise ShapeError(f"{self.name} has no role {name!r}; it has {', '.join(state.roles) or 'none'}")
        if self._region != state.procs.region():
            raise ShapeError(f"only the whole mesh {self.name} has roles, and this is a slice of it")
        ranks = state.roles[name]
        return self.slice(**{state.procs.labels[-1]: slice(ranks.start, ranks.stop)})

    def resize(self, onto: ResizableHosts | None = None, /, **sizes: int) -> ProcMesh:
        """Make the mesh larger or smaller while it lives: ``mesh.resize(gpus=6)``, ``mesh.resize(more, hosts=3)``.

        Ranks keep their numbers: new ones are added at the end, and the last ones leave after their actors have handled
        earlier messages and cleaned up. Actor meshes on all of it are resized with it, and so are this program's other
        references to the whole mesh; slices stay the same. Actors on new ranks are constructed with the original
        arguments. Process groups are recreated at their next use. Last, actors with a method ``__resized__(old, new)``
        are called with the sizes by axis, before any later call. Their earlier calls end first, so that a group that
        such a call makes does not wait for new ranks; if one takes longer than 60 s, the mesh stays as it was.

        A mesh of several hosts grows and shrinks by whole hosts. If a host is lost and no other is available, shrink
        the mesh by one; ``heal_mesh(mesh, hosts=...)`` then puts the host that left in the place of the lost one.

        Args:
            onto: hosts that a mesh of several hosts may grow onto; its present hosts are ignored.
            sizes: the new size of the first axis, which is the axis of hosts if there is one; others must not change.

        Returns:
            This mesh, which can be awaited.

        Raises:
            ShapeError: the size is not positive, another axis would change, or there are too few hosts.
            ArgumentError: ``onto`` is not a host mesh, or this mesh has no axis of hosts.
            AxisError: the mesh has no axis of this name.
            StoppedError: this is a slice or a reference, or was stopped.
            CallTimeoutError: an earlier call of an actor with ``__resized__`` has not ended.
            SupervisionError: the mesh would grow but has dead ranks; heal it first.
            ActorError: the constructor of an actor, or ``__resized__``, raised.
        """
        from monarch._meshes.procs.resize import resize

        resize(self, onto, sizes)
        return self

    @property
    def initialized(self) -> Future[bool]:
        """A future that is True when all processes run and ``bootstrap`` has ended; it fails as the bootstrap does."""
        future = self._state.initialized
        if future is None:
            future = Promise[Any](self._node, self.name)
            future.complete(lambda: True)
            self._state.initialized = future
        return future

    def spawn(self, name: str, cls: type[A], *args: Any, **kwargs: Any) -> A:
        """Make an actor in each process. Return at once; messages to the actors wait until they are constructed.

        A running heal does not delay it either: in processes that are being replaced, the actors are made in the new
        ones.

        ``initialized`` and calls to the actor raise the error of a constructor. If nobody reads it within 0.2 s, it is
        handled like the failure of a broadcast: by the supervisors of the mesh, and finally by
        ``unhandled_fault_hook``.

        Args:
            name: a name for messages and tables; need not be unique.
            cls: a subclass of Actor, from a module, a script or a notebook cell.
            args: positional arguments of its constructor.
            kwargs: keyword arguments of its constructor.

        Returns:
            The ActorMesh of the actors, typed as the class so that its endpoints type-check.

        Raises:
            ArgumentError: the class is not an Actor, an endpoint has the name of an attribute of every mesh, or the
                constructor does not take these arguments.
            SerializationError: an argument cannot be pickled.
            DeviceMeshError: the processes were stopped, or some have died.
        """
        if not is_a(name, str):
            raise TypeError(f"spawn(name, Class, ...): expected a name first, got {name!r}")
        check_class(cls)
        check_names(cls)
        init_arity_of(cls).check(args, kwargs)
        self._check(getattr(cls, "monarch_titles", {}).get("__init__") or f"spawn({name!r})")
        return cast("A", spawn_actors(self, name, cls, args, kwargs))

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> ValueMesh[Any]:
        """Call a function in each process and return the results.

        Args:
            function: from a module, a script or a notebook cell, or a lambda.
            args: positional arguments, the same in every process.
            kwargs: keyword arguments.

        Returns:
            A ValueMesh of the results.

        Raises:
            ActorError: the function raised.
            DeviceMeshError: a process has died, or the mesh was stopped.
            ArgumentError: ``function`` is not callable.
        """
        from monarch._meshes.actors.execute import execute

        return execute(self, function, args, kwargs)

    def _check(self, what: str) -> None:
        state, node = self._state, self._node
        if node.closed:
            raise StoppedError(f"{what}: {self.name} can no longer be used: {node.ended}", mesh=self.name)
        if state.stopped is not None:
            text = f"{what}: {self.name} was stopped ({state.stopped}); {advice().after_stop()}"
            raise StoppedError(text, mesh=self.name)
        state.procs.check(self._region, self.name)
        lost = self._lost() if node.peers.deaths else {}
        if lost and not self._is_decided():
            lost = {}
        if lost:
            raise died(what, self.name, lost, list(self._region.base_ranks()), None, node.names)

    def _is_decided(self) -> bool:
        """Return whether no heal or verdict is open on the mesh; also true in the thread that decides."""
        uid, now = self._state.procs.uid, self._state.changes.now
        return judging.get() or (now is None and not verdicts_of(self._node).is_open(uid))

    def _coming(self) -> dict[int, m.Dead]:
        """Return the dead processes that may be replaced, by base rank."""
        if not self._node.peers.deaths or self._is_decided():
            return {}
        return {self._region.base_rank(position): dead for position, dead in self._lost().items()}

    def _living(self) -> list[str]:
        """Return the proc ids of the processes not known to be dead."""
        procs = [self._state.procs.proc(rank) for rank in self._region.base_ranks()]
        return [proc for proc in procs if self._node.peers.get(proc).dead is None]

    def _lost(self) -> dict[int, m.Dead]:
        """Return the processes that have died, by position."""
        lost: dict[int, m.Dead] = {}
        for position, rank in enumerate(self._region.base_ranks()):
            peer = self._node.peers.known.get(self._state.procs.proc(rank))
            if peer is not None and peer.dead is not None:
                lost[position] = peer.dead
        return lost

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """End the processes after their actors have handled earlier messages and cleaned up.

        It begins at once; the returned future is done when the processes have ended. Actors end as with
        ``ActorMesh.stop``, with the same bounds. Then non-daemon threads, and ``atexit`` functions, get 5 s
        each. A process is killed if its actor ignores two interrupts, or if it is silent for 3 s. `monarch.config` has
        the bounds.

        Raises:
            StoppedError: this is a view or a reference, or this process is a fork of the owner; only the owner stops
                a mesh, as a whole.
        """
        state, node = self._state, self._node
        if not state.owned or self._region != state.procs.region():
            raise StoppedError(f"{self.name} can only be stopped as a whole, by its owner", mesh=self.name)
        if is_left_behind(node):
            raise StoppedError(f"{self.name} cannot be stopped here: {node.ended}", mesh=self.name)
        return begin_stop(node, state, reason, STOP_REACT())

    def events(self) -> EventTable:
        """Return what has happened to the ranks, oldest first: starts, calls, reports, metrics, deaths.

        The table has the newest events. Its methods select some, and ``to_pandas`` and ``to_arrow`` convert it.

        Raises:
            MonarchError: this is a reference to a mesh that was spawned elsewhere, or a slice of one that is gone.
        """
        return events_of(self)

    async def logging_option(
        self, stream_to_client: bool = True, aggregate_window_sec: float | None = None, level: int = logging.INFO
    ) -> None:
        """Set how the output of these processes is shown here.

        Args:
            stream_to_client: whether to show it.
            aggregate_window_sec: seconds to wait for equal lines of several ranks, which are shown as one; None for
                the default.
            level: the lowest level of ``logging`` records to show.

        Raises:
            ValueError: the window is negative, or the level is not from 0 to 255.
        """
        if aggregate_window_sec is not None and not aggregate_window_sec >= 0:
            raise ValueError(f"aggregate_window_sec: expected seconds, at least 0, got {aggregate_window_sec!r}")
        if not 0 <= level <= 255:
            raise ValueError(f"level: expected 0 to 255, got {level}")
        agents_of(self._node).output_options(self._state.procs.uid, stream_to_client, aggregate_window_sec)
        peers = [self._node.peers.get(self._state.procs.proc(rank)) for rank in self._region.base_ranks()]
        send_to_all(self._node, peers, m.encode(m.Level(self._node.proc, level)))

    def to_table(self) -> str:
        """Return a text table of the processes and where they run."""
        return text_table(*member_rows(self._node, self._state.procs, self._region), SHOWN + 1)

    def _title(self) -> str:
        axes = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        return f"ProcMesh {called(self.name, self._state.procs.region(), self._region)!r} ({axes})" + (
            " stopped" if self._state.stopped else ""
        )

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def __rich__(self) -> Any:
        return rich_table(*member_rows(self._node, self._state.procs, self._region), SHOWN + 1, title=self._title())

    def _repr_html_(self) -> str:
        headers, rows = member_rows(self._node, self._state.procs, self._region)
        return html_table(headers, rows, SHOWN + 1, title=self._title())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcMesh) and (self._state.procs, self._region) == (other._state.procs, other._region)

    def __hash__(self) -> int:
        return hash((self._state.procs, self._region))

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcMesh._received, (self._node.origin, self._state.procs, self._region)


def whole_of(state: ProcsState, node: Node) -> ProcMesh:
    """Return the whole mesh that a state belongs to."""
    return ProcMesh(state, state.procs.region(), node)


def this_proc() -> ProcMesh:
    """Return the process that this code runs in, as a mesh of one. Actors spawned on it live here."""
    node = open_node()
    if node.config is not None:
        procs = node.config.procs
        return ProcMesh.refer(procs, Region((), node.rank, (), ()))
    procs = Procs(node.proc, "this_proc", (), 0, node.proc, Roster(0, (node.host,), 1, ()))
    return ProcMesh.refer(procs, Region((), 0, (), ()))
