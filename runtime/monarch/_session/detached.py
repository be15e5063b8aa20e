"""Detached meshes: processes and actors that outlive their program until another one of the same user attaches them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from monarch._core.shapes.region import Region
from monarch._core.supervision import Restart
from monarch._core.text.durations import parse_duration
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.execute import Runner
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.host_mesh import HostMesh, SharedHosts
from monarch._meshes.inside import state_of
from monarch._meshes.procs.proc_mesh import ProcMesh, whole_of
from monarch._meshes.procs.starting import Starting
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.current import open_node
from monarch._node.future import Future, Ready
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.rank_config import ActorSpec, RankConfig
from monarch._node.remote_errors import unpack_failure
from monarch._node.services.asking import ask_proc, tell_agent
from monarch._procs.agent.detached import DetachedConfig
from monarch._procs.agent.detached_records import Record, check_name, find, records
from monarch._procs.agent.services import AgentRequest, claim, describe_procs, listen, note
from monarch._procs.launch.local import HostAgent
from monarch._procs.os.posix import memfd, outlives
from monarch._procs.rank.output import read_tail
from monarch._procs.session_folder import host_of
from monarch._session.local_agent import LATER, PRELOAD
from monarch._session.reattach import adopt, make_spec, spec_of
from monarch._session.session import Session, need_session, session_of
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.pickling import dumps_whole, loads
from monarch.exceptions import (
    ArgumentError,
    CallTimeoutError,
    DetachedMeshInUseError,
    MonarchError,
    NoDetachedMeshError,
    SpawnError,
)

__all__ = ["DetachedMesh", "attach", "end", "keep", "records"]

_HERE = "127.0.0.1"
_PATIENCE = 10.0
_LEAST = 1.0
"""The shortest lease, in seconds."""
_Differences: TypeAlias = (
    "tuple[dict[str, str | None], dict[int, dict[str, str | None]], int, dict[str, range], Restart | None]"
)
"""Environment of the mesh, and of ranks that differ; number of spares, ranks by role, and rule of restarts."""


class DetachedHosts(HostMesh):
    """The host of a detached mesh, or a view of it."""

    def spawn_procs(self, *args: Any, **kwargs: Any) -> ProcMesh:
        """Start processes as on any host; they and their settings are detached."""
        mesh = super().spawn_procs(*args, **kwargs)
        shared = state_of(mesh)
        starting = shared.starting
        assert starting is not None
        how = (starting.variables, dict(starting.of_ranks), starting.want_spares, shared.roles)
        description = dumps_whole((*how, shared.supervision.restart))
        tell_agent(self._node, self._hosts[0], describe_procs(shared.procs.uid, description))
        return mesh


class DetachedMesh:
    """A detached mesh that this program has attached. It outlives the program until its lease ends.

    Attributes:
        name: its name.
        seconds: its lease without a program, in seconds.
        hosts: its host; processes spawned there outlive the program.
        procs: the process meshes that earlier programs spawned there.
        actors: the actor meshes on them.
        book: the last ``note`` of this or an earlier program.
        dropped: bytes of output that were discarded while no program was attached.
        problems: descriptions of parts that could not be attached.
    """

    def __init__(self, record: Record, node: Node) -> None:
        self.name = record.name
        self.seconds = record.seconds
        self.procs: list[ProcMesh] = []
        self.actors: list[ActorMesh] = []
        self.book = b""
        self.dropped = 0
        self.problems: list[str] = []
        self._record = record
        self._node = node
        region = Region((), 0, (), ())
        self.hosts = DetachedHosts((record.host,), region, node, SharedHosts(self.end, region))

    def note(self, book: bytes) -> None:
        """Store a note for the next program, replacing the previous one."""
        self.book = book
        tell_agent(self._node, self._record.host, note(book))

    def leave(self) -> None:
        """Detach from the mesh: its lease begins, and this program or another one may attach it."""
        _session().forget(self._record.host)

    @property
    def attached(self) -> bool:
        """Whether this program still has it attached: the connection may have broken."""
        return not self._node.closed and _session().detached.get(self._record.host) is self

    def end(self) -> None:
        """End the mesh: its processes and its record.

        Raises:
            DetachedMeshInUseError: the connection had broken, and another program has attached it.
        """
        record = self._record
        if not self.attached:
            with suppress(NoDetachedMeshError):
                if find(self.name).host == record.host:
                    end(self.name)
            return
        _session().release([record.host])
        if outlives(record.pid, record.start, _PATIENCE):
            os.kill(record.pid, signal.SIGKILL)

    def __repr__(self) -> str:
        return f"<DetachedMesh {self.name!r} ({len(self.procs)} process meshes, {len(self.actors)} actor meshes)>"


def keep(name: str, duration: float | str) -> DetachedMesh:
    """Start a host on this machine whose processes outlive this program.

    Args:
        name: the name to attach it by; a Python identifier.
        duration: its lease while no program has it attached: seconds, or a string such as ``2h``.

    Raises:
        DetachedMeshInUseError: a mesh of this name exists.
        ArgumentError: the name or the duration is invalid.
        SpawnError: it could not be started.
    """
    check_name(name)
    seconds = parse_duration(duration) if isinstance(duration, str) else float(duration)
    if not _LEAST <= seconds <= 366 * 86400:
        raise ArgumentError(f"duration: expected at least {_LEAST:g} s and at most a year, got {duration!r}")
    keys = KeyPair.new()
    public, secret = keys.public.decode(), keys.secret.decode()
    errors = memfd("detached-stderr")
    try:
        config = DetachedConfig(
            "",
            "",
            "",
            0,
            0,
            PRELOAD,
            f"tcp://{_HERE}",
            public,
            (public, secret),
            later=LATER,
            name=name,
            seconds=seconds,
        )
        agent = HostAgent(config, errors, announces=True, module="monarch._procs.agent.detached", stays=True)
        try:
            line = agent.first_line()
        finally:
            agent.part()
        if not line:
            output = read_tail(errors, 4096).data.decode(errors="replace").strip().splitlines()
            raise SpawnError(
                f"the agent of the detached mesh {name!r} ended during startup{': ' + output[-1] if output else ''}"
            )
    finally:
        os.close(errors)
    answer = msgspec.json.decode(line)
    if isinstance(answer, str):
        raise DetachedMeshInUseError(answer)
    record = find(name)
    try:
        detached, _ = _connect(record)
        _ask(_place(detached)[0], record.host, listen())
    except BaseException:
        # Nobody else knows it yet.
        if record.alive():
            os.kill(record.pid, signal.SIGTERM)
        raise
    return detached


def attach(name: str, timeout: float = _PATIENCE) -> DetachedMesh:
    """Make this program the controller of a detached mesh, and show the output since the last program.

    Args:
        name: its name.
        timeout: seconds for its processes to answer, even if their actors are busy.

    Raises:
        NoDetachedMeshError: no mesh has this name, or its lease has ended.
        DetachedMeshInUseError: another program has it attached; the text names the process.
        MonarchError: its record is unusable; see ``records``.
    """
    detached, known = _connect(find(name))
    node, host = _place(detached)
    try:
        _take(detached, known, timeout)
    except BaseException:
        # This program may try again, or another one may attach it.
        need_session(node).forget(host)
        raise
    return detached


def end(name: str) -> None:
    """End a detached mesh that no other program has attached.

    Raises:
        NoDetachedMeshError: no mesh has this name.
        DetachedMeshInUseError: another program has it attached.
    """
    record = find(name)
    known: DetachedMesh | None = _session().detached.get(record.host)
    (known or _connect(record)[0]).end()


def _session() -> Session:
    session: Session | None = session_of(open_node())
    if session is None:
        raise MonarchError("only the program can detach and attach meshes, not a rank")
    return session


def _connect(record: Record) -> tuple[DetachedMesh, dict[str, Any]]:
    """Become the controller of a detached host, and return its agent's description of it."""
    session = _session()
    node, host = session.node, record.host
    if host in session.detached:
        raise DetachedMeshInUseError(f"this program has already attached the detached mesh {record.name!r}")
    keys = KeyPair(record.public.encode(), record.secret.encode())
    session.forget(host)
    session.listen(KeyPair.new(), _HERE, [record.public])
    try:
        listening = session.greet(record.address, keys, _PATIENCE)
    except SpawnError:
        raise NoDetachedMeshError(
            f"the detached mesh {record.name!r} did not answer at {record.address} within {_PATIENCE:g} s; its agent "
            f"is process {record.pid}"
        ) from None
    # Ignore earlier messages from it, if this program had it attached before.
    session.forget_peers(host)
    try:
        if host_of(listening.src) != host:
            raise MonarchError(f"{listening.src} answered at {record.address}, not the detached mesh {record.name!r}")
        known = _ask(node, host, claim(os.getpid()))
        assert node.hosts.keys is not None
        session.attach([listening], node.hosts.keys, _HERE, own=False, joins=False)
    except BaseException:
        session.forget(host_of(listening.src))
        raise
    detached = session.detached[host] = DetachedMesh(record, node)
    detached.book, detached.dropped = known["book"], known["dropped"]
    return detached, known


def _take(detached: DetachedMesh, known: dict[str, Any], timeout: float) -> None:
    """Make meshes of the processes and actors, and make this program the owner of the ranks."""
    node, host = _place(detached)
    output = need_session(node).output
    # Do not repeat output that an earlier program showed, nor take the end of that program for a loss.
    output.know({(proc, stream): offset for proc, stream, offset in known["passed"]})
    _ask(node, host, listen())
    output.flush()
    deadline = time.monotonic() + timeout
    asked = [(proc, ask_proc(proc, adopt, node.proc, known["former"])) for proc, *_ in known["procs"]]
    where: dict[str, list[str]] = {}
    for proc, answer in asked:
        try:
            _, keys = answer.get(max(0.0, deadline - time.monotonic()))
        except CallTimeoutError:
            detached.problems.append(
                f"process {proc} does not answer (it may be in C code); attach again when it is done"
            )
        except MonarchError as error:
            detached.problems.append(f"process {proc} was lost in the meantime: {error}")
        else:
            for key in keys:
                where.setdefault(key, []).append(proc)
    alive = {proc: pid for proc, _, pid in known["procs"]}
    for order, description in known["orders"]:
        spawn = m.decode(order)
        assert isinstance(spawn, m.Spawn)
        _add_procs(detached, spawn, description, alive)
    for key, procs in where.items():
        _add_actors(detached, key, procs, max(1.0, deadline - time.monotonic()))


def _place(detached: DetachedMesh) -> tuple[Node, str]:
    """Return the node of this program, and the host of a mesh."""
    return detached._node, detached._record.host  # pyright: ignore[reportPrivateUsage]


def _add_procs(detached: DetachedMesh, order: m.Spawn, description: bytes, alive: dict[str, int]) -> None:
    """Return the process mesh of an order."""
    node, host = _place(detached)
    config: RankConfig = loads(order.config)
    procs = config.procs
    procs.owner = node.proc
    if not meshes_of(node).own_procs:
        # No rank has this program's secret for buffers yet, so take over theirs.
        node.hosts.secret = config.secret
    # If the program died before it stored the differences, all ranks are alike.
    how: _Differences = loads(description) if description else (order.env, {}, 0, {}, None)
    variables, of_ranks, want_spares, roles, restart = how
    shared = ProcsState(procs, True)
    shared.roles = roles
    start = Starting(
        node, procs, config.bootstrap, "", variables, of_ranks, order.binds, order.path, order.cwd, want_spares
    )
    start.spares[host] = [name for name in _names(alive, f"{procs.uid}.s") if name not in procs.roster.names.values()]
    shared.starting = start
    shared.supervision.restart = restart
    node.part(Liveness).watch(procs.uid, None)
    meshes_of(node).add_procs(procs.uid, procs.name, "", shared)
    for rank in procs.region().base_ranks():
        proc = procs.proc(rank)
        meshes_of(node).joined.tell(procs.uid, rank, proc)
        if proc in alive:
            node.events.ready.tell(m.Ready(proc, alive[proc]))
    detached.procs.append(whole_of(shared, node))
    for rank in procs.region().base_ranks():
        # Asks for news of its death, even an old one.
        node.peers.get(procs.proc(rank))


def _names(procs: Iterable[str], prefix: str) -> list[str]:
    """Return the names of procs with a prefix."""
    return [name for name in (proc.partition("/")[2] for proc in procs) if name.startswith(prefix)]


def _add_actors(detached: DetachedMesh, key: str, procs: list[str], timeout: float) -> None:
    """Return the actor mesh of a key that some procs have reported."""
    node, _ = _place(detached)
    try:
        whole, body, buffers = ask_proc(procs[0], spec_of, key).get(timeout)
        spec: ActorSpec = make_spec(body, buffers)
    except MonarchError as error:
        detached.problems.append(f"actors {key.rpartition('-')[0]!r} cannot be used here: {error}")
        return
    spec.owner, spec.owner_actor = node.proc, ""
    if spec.whole:
        spec.region = spec.procs.region()
    state = ActorsState(key, spec.name, spec.cls, spec.procs, spec.region, True)
    state.initialized = Ready(node, spec.name, None)
    # Without its arguments an actor cannot be recreated.
    state.spec = spec if whole else None
    mesh = ActorMesh(state, spec.region, node)
    meshes_of(node).add_actors(key, mesh)
    meshes_of(node).owners[key] = ""
    if spec.cls is Runner:
        shared = meshes_of(node).own_procs.get(spec.procs.uid)
        if shared is not None:
            shared.runner = mesh
    else:
        detached.actors.append(mesh)


def _ask(node: Node, host: str, asked: AgentRequest) -> Any:
    """Send a request to the agent of a detached mesh and wait for its answer."""
    answer = _Answer(node, host, asked.name)
    node.peers.get(f"{host}/agent").send(asked.frame(node.proc, answer.port))
    return answer.get(_PATIENCE)


class _Answer(Future[Any]):
    """The answer of an agent."""

    __slots__ = ("_agent", "_reply", "port", "targets")

    def __init__(self, node: Node, host: str, service: str) -> None:
        super().__init__(node, f"the agent of the detached mesh ({service})")
        self._agent = f"{host}/agent"
        self._reply: m.Reply | None = None
        self.targets = (node.peers.get(self._agent),)
        self.port = node.ports.open(self)

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Take the answer."""
        self._reply = reply
        self._node.ports.close(self.port)
        self._complete()

    def lost(self, peer: Any, dead: m.Dead) -> bool:
        """Fail if the agent has died."""
        if self.done or peer.proc != self._agent:
            return False
        self._node.ports.close(self.port)
        self._complete()
        return True

    def _make(self) -> Any:
        if self._reply is None:
            raise NoDetachedMeshError("the detached mesh has ended in the meantime")
        if self._reply.status == m.RESULT:
            return m.unpack(self._reply.body)
        failure = unpack_failure(self._reply.body)
        raise (DetachedMeshInUseError if failure.kind == DetachedMeshInUseError.__name__ else MonarchError)(
            failure.text
        )
