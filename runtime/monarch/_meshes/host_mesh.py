"""Meshes of hosts, and processes on them."""

from __future__ import annotations

import inspect
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from monarch._actors.running import current
from monarch._core.kinds import is_a, is_count, is_mapping
from monarch._core.roster import Procs, Roster
from monarch._core.shapes.extent import Extent, Point, axes_text
from monarch._core.shapes.mesh_view import MakesViews
from monarch._core.shapes.region import Region
from monarch._core.supervision import Restart
from monarch._core.text.tables import html_table, text_table
from monarch._meshes.actors.creation import Booting
from monarch._meshes.async_resource import AsyncResource
from monarch._meshes.inside import node_of, region_of, state_of
from monarch._meshes.mesh_like import ResizableHosts
from monarch._meshes.ownership import own_by_current
from monarch._meshes.procs.agents import agents_of
from monarch._meshes.procs.limits import check_room
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._meshes.procs.roles import Role, axes_of, environments, ranges_of
from monarch._meshes.procs.starting import ProcStarter
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import is_boot_unwanted, meshes_of
from monarch._node.current import node_for, open_node
from monarch._node.future import Future, Promise, in_thread
from monarch._node.liveness import Liveness, check_bound
from monarch._node.node import Node
from monarch._node.replies.gather import Gather
from monarch._wire.pickling import dumps_whole
from monarch.exceptions import ArgumentError, EnvError, ShapeError, SpawnError, StoppedError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class BootstrapCommand:
    """How to start processes; only its environment applies here, since processes are forks of a warm one.

    A value of None removes a variable.
    """

    program: str = field(default_factory=lambda: sys.executable)
    arg0: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """Return a copy with more variables."""
        return BootstrapCommand(self.program, self.arg0, self.args, {**self.env, **env}, self.inherit_env)


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the default way to start processes."""
    return BootstrapCommand()


class HostMesh(ResizableHosts, MakesViews, AsyncResource):
    """Hosts, each with an agent that starts processes; ``this_host()`` is the one that this program runs on."""

    def __init__(self, hosts: tuple[str, ...], region: Region, node: Node, shared: SharedHosts) -> None:
        self._hosts = hosts
        self._region = region
        self._node = node
        self._shared = shared

    @classmethod
    def of_hosts(cls, hosts: tuple[str, ...], region: Region, node: Node, name: str = "") -> HostMesh:
        """Return a reference to hosts of this session."""
        return cls(hosts, region, node, SharedHosts(None, name=name))

    @classmethod
    def _received(cls, origin: str, hosts: tuple[str, ...], region: Region, name: str) -> HostMesh:
        """Return a reference that has arrived in a message; SerializationError outside its session."""
        which = f"the host mesh {name!r}" if name else "a host mesh"
        return cls.of_hosts(hosts, region, node_for(which, origin, hosts), name)

    def _view(self, region: Region) -> Self:
        return type(self)(self._hosts, region, self._node, self._shared)

    @property
    def initialized(self) -> Future[bool]:
        """True at once: attached hosts have answered, and messages to this host wait until it is up."""
        promise: Promise[Any] = Promise(self._node, "hosts")
        promise.complete(lambda: True)
        return promise

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str] | Sequence[int]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        env: Mapping[str, Any] | None = None,
        restart: str | Restart | None = None,
        spares: int = 0,
        roles: Mapping[str, Role] | None = None,
        silence: float | None = None,
    ) -> ProcMesh:
        """Start processes on each host. Return at once; messages to them wait until they are up.

        Args:
            per_host: axes of the processes of one host with their sizes, as in ``{"gpus": 8}``; default: one process.
            bootstrap: a function, sync or async, that runs in each process before its actors are made.
            name: a name for messages and tables.
            proc_bind: the cores that each process of a host may use: a sequence of core numbers, or
                ``{"cpus": "0-3"}``. By default the cores are divided among the processes.
            bootstrap_command: only its ``env`` applies. A function of the Point of a process may return one for each;
                processes of hosts that join later have those of the first host.
            env: environment variables, set before any user code runs; None removes one.
            restart: ``"on-failure"``, or a Restart with its own limits: dead ranks are replaced automatically, and
                their actors constructed again, up to 3 times in 60 s; calls made meanwhile wait.
            spares: how many warm processes each host keeps to replace dead ones.
            roles: ranks that differ, by name: ``{"train": Role(4), "load": Role(2, device="cpu")}`` has six ranks on
                each host, along the axis ``procs`` unless ``per_host`` says otherwise; ``mesh.role("load")`` is a view.
            silence: seconds after which a living rank that does not answer, while a call waits for it, is reported as
                unresponsive on stderr and in tables: it was stopped by a signal, or is in C code that holds the GIL.
                None for 5.

        Raises:
            ShapeError: a size is not positive, the hosts already have an axis of this name, or ``proc_bind`` or
                ``roles`` do not fit.
            ArgumentError: ``restart``, ``spares`` or ``silence`` is invalid.
            SpawnError: a host is lost.
            LimitError: this host has too few file descriptors for so many processes; none was started.
            StoppedError: the hosts were shut down.
        """
        node = self._node
        if self._shared.stopped or node.closed:
            which = f"the hosts {self._shared.name}" if self._shared.name else "these hosts"
            raise StoppedError(
                f"{which} were shut down; get new ones from this_host(), attach_to_workers() or a job",
                mesh=self._shared.name or "hosts",
            )
        rule = restart_of(restart)
        if not is_count(spares):
            raise ArgumentError(f"spares: expected a number of processes per host, got {spares!r}")
        check_bound(silence)
        local = _local_extent(self.extent, axes_of(per_host, roles))
        extent = Extent((*self.extent.labels, *local.labels), (*self.extent.sizes, *local.sizes))
        by_rank: dict[int, dict[str, str | None]] = {}
        if callable(bootstrap_command):
            by_rank = _environments(bootstrap_command, extent, env)
            variables = _environment(None, env)
        else:
            variables = _environment(bootstrap_command, env)
        count = prod(local.sizes)
        binds = _binds(proc_bind, count)
        hosts = tuple(self._hosts[rank] for rank in self._region.base_ranks())
        _check_hosts(node, hosts)
        check_room(node, {host: number * (count + spares) for host, number in Counter(hosts).items()})
        packed = dumps_whole(bootstrap, "bootstrap") if bootstrap is not None else None
        path, cwd = [path for path in sys.path if is_a(path, str)], _cwd()
        for rank, of_role in environments(roles, len(hosts), count).items():
            by_rank[rank] = {**by_rank.get(rank, {}), **of_role}
        uid = secrets.token_hex(4)
        called = name or "procs"
        roster = Roster(0, hosts, count, extent.sizes)
        procs = Procs(uid, called, extent.labels, self.ndim, node.proc, roster)
        here = current.get()
        shared = ProcsState(procs, True)
        mesh = ProcMesh(shared, procs.region(), node)
        # An interrupt comes before the program knows the mesh, or after its agents do.
        held = node.receive_loop.hold()
        try:
            try:
                peers = [node.peers.get(procs.proc(rank), starting=True) for rank in range(extent.nelements)]
                gather: Gather[Any] = Booting(node, peers, extent, called, uid, lambda: is_boot_unwanted(node, uid))
                shared.initialized = gather
                node.part(Liveness).watch(uid, silence)
                meshes_of(node).add_procs(uid, called, own_by_current(mesh), shared)
                owner = here[0].key if here else ""
                shared.roles = ranges_of(roles)
                shared.starting = ProcStarter(node, procs, packed, owner, variables, by_rank, binds, path, cwd, spares)
                shared.supervision.restart = rule
                for rank in range(extent.nelements):
                    meshes_of(node).joined.tell(uid, rank, procs.proc(rank))
                shared.starting.start(range(extent.nelements), gather.port)
                shared.starting.fill()
            finally:
                node.receive_loop.let_go(held)
            gather.check()
            return mesh
        except BaseException:
            # The caller never gets it.
            if shared.starting is not None:
                mesh.stop()
            raise

    def shutdown(self) -> Future[None]:
        """End the agents of these hosts and everything that runs there.

        Raises:
            StoppedError: this is a view, a reference, or the host that this program runs on.
        """
        shared = self._shared
        if shared.release is None or self._region != shared.region:
            raise StoppedError(
                f"{self!r} cannot be shut down: it is a view or a reference, or the host that this program runs on; "
                f"call shutdown() on the whole mesh that attach_to_workers() returned",
                mesh=self._shared.name or "hosts",
            )
        if not shared.stopped:
            shared.stopped = True
            release = shared.release
            shared.stopping = in_thread(self._node, "shutdown", release)
        assert shared.stopping is not None
        return shared.stopping

    stop = shutdown

    def __exit__(self, *error: Any) -> None:
        # Only attached hosts are ended, not, for example, this one.
        if self._shared.release is not None:
            self.shutdown().get()

    async def __aexit__(self, *error: Any) -> None:
        if self._shared.release is not None:
            await self.shutdown()

    def to_table(self) -> str:
        """Return a text table of the hosts."""
        return text_table(*self._rows(), 33)

    def _rows(self) -> tuple[list[str], list[list[object]]]:
        rows: list[list[object]] = []
        for point, rank in zip(self.coordinates, self._region.base_ranks(), strict=True):
            rows.append([point.rank, *(point[label] for label in point), self._hosts[rank]])
        return ["rank", *self.extent.labels, "host"], rows

    def _title(self) -> str:
        return f"HostMesh {self._shared.name!r}" if self._shared.name else "HostMesh"

    def __repr__(self) -> str:
        return f"<{self._title()} ({axes_text(self.extent) if self.ndim else self._hosts[self._region.base_rank(0)]})>"

    def _repr_html_(self) -> str:
        return html_table(*self._rows(), 33, title=self._title())

    def __eq__(self, other: object) -> bool:
        # A host is the same in any view of any mesh, on the program and on ranks.
        return isinstance(other, HostMesh) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Extent, tuple[str, ...]]:
        return self.extent, tuple(self._hosts[rank] for rank in self._region.base_ranks())

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMesh._received, (self._node.origin, self._hosts, self._region, self._shared.name)


class SharedHosts:
    """State that all views of one host mesh share in this process."""

    def __init__(self, release: Callable[[], None] | None, region: Region | None = None, name: str = "") -> None:
        self.release = release
        self.region = region
        self.name = name
        self.stopped = False
        self.stopping: Future[None] | None = None


def attached(hosts: tuple[str, ...], node: Node, release: Callable[[], None], name: str = "") -> HostMesh:
    """Return a mesh of hosts that this program has attached and owns."""
    region = Region.full(Extent(("hosts",), (len(hosts),)))
    return HostMesh(hosts, region, node, SharedHosts(release, region, name))


def this_host() -> HostMesh:
    """Return the host that this code runs on, as a mesh without axes."""
    node = open_node()
    agents_of(node).need_agent()
    return HostMesh.of_hosts((node.host,), Region((), 0, (), ()), node)


def proc_mesh(
    *, gpus: int = 1, hosts: int = 1, env: Mapping[str, Any] | None = None, name: str | None = None
) -> ProcMesh:
    """Start processes on this host. ``await`` the mesh to wait until they are up.

    Args:
        gpus: the number of processes, along the axis ``gpus``.
        hosts: must be 1.
        env: environment variables, set before any user code runs.
        name: a name for messages and tables.

    Raises:
        ShapeError: ``gpus`` is not positive, or ``hosts`` is not 1.
    """
    if hosts != 1:
        raise ShapeError(f"proc_mesh starts processes on this host only; hosts: expected 1, got {hosts!r}")
    return this_host().spawn_procs({"gpus": gpus}, env=env, name=name)


def _check_hosts(node: Node, hosts: Sequence[str]) -> None:
    """Raise SpawnError if hosts are lost."""
    lost = {host: why.reason for host in dict.fromkeys(hosts) if (why := node.hosts.out_of_reach(host)) is not None}
    if lost:
        host, reason = next(iter(lost.items()))
        more = f", and {len(lost) - 1} more of these hosts are unreachable" if len(lost) > 1 else ""
        raise SpawnError(
            f"cannot start processes on host {host}: its agent {reason}{more}. "
            f"Use a slice of the remaining hosts, or attach the lost ones again"
        )


def _local_extent(hosts: Extent, per_host: Mapping[str, int] | None) -> Extent:
    axes = dict(per_host or {})
    for label, size in axes.items():
        if not is_count(size, 1):
            raise ShapeError(f"per_host[{label!r}]: expected a number of processes of at least 1, got {size!r}")
        if label in hosts:
            raise ShapeError(f"the hosts already have an axis {label!r} ({axes_text(hosts)}); choose another name")
    return Extent(tuple(axes), tuple(axes.values()))


def restart_of(restart: str | Restart | None) -> Restart | None:
    """Return the restart rule; raise ArgumentError if it is invalid."""
    if restart is None or restart in ("never", ""):
        return None
    if isinstance(restart, Restart):
        return restart
    if restart == "on-failure":
        return Restart()
    raise ArgumentError(f'restart: expected "on-failure", "never" or a Restart(most=3, within=60), got {restart!r}')


def _environments(
    command: Callable[[Point], BootstrapCommand], extent: Extent, env: Mapping[str, Any] | None
) -> dict[int, dict[str, str | None]]:
    """Return the variables of the command of each process, without those that ``env`` has for all."""
    try:
        inspect.signature(command).bind(Point(0, extent))
    except TypeError:
        raise _no_command(command) from None
    except ValueError:
        # A function of C may not tell.
        pass
    by_rank: dict[int, dict[str, str | None]] = {}
    for rank in range(extent.nelements):
        made = command(Point(rank, extent))
        if not is_a(made, BootstrapCommand):
            raise _no_command(made)
        variables = _environment(made, None)
        by_rank[rank] = {name: value for name, value in variables.items() if name not in (env or {})}
    return by_rank


def _no_command(command: object) -> ArgumentError:
    return ArgumentError(
        f"bootstrap_command: expected a BootstrapCommand, or a function that returns one for a Point, got {command!r}; "
        f"pass a function to run first as bootstrap="
    )


def _environment(command: BootstrapCommand | None, env: Mapping[str, Any] | None) -> dict[str, str | None]:
    if command is not None and not is_a(command, BootstrapCommand):
        raise _no_command(command)
    if env is not None and not is_a(env, Mapping):
        raise EnvError(f"env: expected a mapping of names to values, got {env!r}")
    variables: dict[str, Any] = {**(command.env if command is not None else {}), **(env or {})}
    for key, value in variables.items():
        if not is_a(key, str) or not key or "=" in key or "\0" in key:
            raise EnvError(f"env: expected a name without '=' or NUL, got {key!r}")
        if value is not None and not isinstance(value, (str, int, float)):
            raise EnvError(f"env[{key!r}]: expected str, int, float or None, got {value!r}")
    return {key: None if value is None else str(value) for key, value in variables.items()}


def _binds(proc_bind: Sequence[Any] | None, count: int) -> list[list[int] | None]:
    if proc_bind is None:
        return []
    if len(proc_bind) != count:
        raise ShapeError(f"proc_bind: expected {count} entries, one per process of a host, got {len(proc_bind)}")
    return [_cores(bind) for bind in proc_bind]


def _cores(bind: Any) -> list[int]:
    from monarch._core.shapes.ranks import parse_ranks

    if is_mapping(bind):
        text = bind.get("cpus") or bind.get("physcpubind") or bind.get("cpunodebind")
        bind = text if text is not None else ""
    cores = parse_ranks(bind) if isinstance(bind, str) else [int(core) for core in bind]
    missing = [core for core in cores if core not in os.sched_getaffinity(0)]
    if not cores or missing:
        raise ShapeError(f"proc_bind: cores {missing or bind!r} are not available to processes on this machine")
    return cores


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _hosts_of(mesh: ProcMesh) -> HostMesh:
    """Return the hosts that the processes of a mesh are on."""
    procs = state_of(mesh).procs
    if not region_of(mesh).labels:
        rank = region_of(mesh).base_rank(0)
        return HostMesh.of_hosts((procs.host(rank),), Region((), 0, (), ()), node_of(mesh))
    return HostMesh.of_hosts(procs.hosts, procs.host_region(), node_of(mesh))


ProcMesh.host_mesh = property(_hosts_of)
