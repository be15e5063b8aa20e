"""Kept meshes: procs and actors that outlive their program, and that another one of the same user attaches."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

import msgspec

from monarch._core.shapes.region import Region
from monarch._core.text.durations import parse_duration
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.execute import Runner
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.host_mesh import HostMesh, _SharedHosts
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
from monarch._procs.os.posix import memfd, outlives
from monarch._procs.rank.output import read_tail
from monarch._procs.session_folder import host_of
from monarch._session.reattach import adopt, make_spec, spec_of
from monarch._session.session import LATER, PRELOAD, Session, need_session, session_of
from monarch._session.workers import start_agent
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.pickling import dumps, loads
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
"""Seconds of the shortest lease."""


class DetachedHosts(HostMesh):
    """The host of a kept mesh, or a view of it."""

    def spawn_procs(self, *args: Any, **kwargs: Any) -> ProcMesh:
        """As that of any host; the processes are kept, and how they were asked for."""
        mesh = super().spawn_procs(*args, **kwargs)
        shared = mesh._state
        starting = shared.starting
        assert starting is not None
        how = (starting.variables, dict(starting.of_ranks), starting.want_spares, shared.roles)
        told = dumps((*how, shared.supervision.restart))[0]
        tell_agent(self._node, self._hosts[0], describe_procs(shared.procs.uid, told))
        return mesh


class DetachedMesh:
    """A kept mesh that this program has attached. It goes on when the program ends, until its lease does.

    Attributes:
        name: its name.
        seconds: how long it lives without a program.
        hosts: the host that it is on; processes that are spawned there are kept.
        procs: the meshes of processes that programs before this one have spawned there.
        actors: the meshes of actors that they have.
        book: what was left by ``note``, here or by programs before.
        dropped: bytes that were printed while no program was there, and that there was no room for.
        problems: what could not be had, each in words.
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
        self.hosts = DetachedHosts((record.host,), region, node, _SharedHosts(self.end, region))

    def note(self, book: bytes) -> None:
        """Leave something for the program that attaches it next, in place of what was left before."""
        self.book = book
        tell_agent(self._node, self._record.host, note(book))

    def leave(self) -> None:
        """Let go of it without ending it: its lease begins, and this program or another one may attach it."""
        _session().forget(self._record.host)

    @property
    def attached(self) -> bool:
        """Whether this program has it still: the connection may have broken."""
        return not self._node.closed and _session().kept.get(self._record.host) is self

    def end(self) -> None:
        """End it: its processes, and its record.

        Raises:
            TakenError: the connection had broken, and another program has it by now.
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
        return f"<Kept {self.name!r} ({len(self.procs)} meshes of processes, {len(self.actors)} of actors)>"


def keep(name: str, duration: float | str) -> DetachedMesh:
    """Start a host on this machine whose processes outlive this program.

    Args:
        name: by which it is attached; a name as of a variable.
        duration: how long it lives while no program has it attached: seconds, or a text such as ``2h``.

    Raises:
        TakenError: there is one of that name already.
        ArgumentError: the name or the duration cannot be.
        SpawnError: it could not be started.
    """
    check_name(name)
    seconds = parse_duration(duration) if isinstance(duration, str) else float(duration)
    if not _LEAST <= seconds <= 366 * 86400:
        raise ArgumentError(f"a mesh is kept for at least {_LEAST:g} s and at most a year, and not for {duration!r}")
    keys = KeyPair.new()
    public, secret = keys.public.decode(), keys.secret.decode()
    errors = memfd("kept-stderr")
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
        process = start_agent(config, stdout=subprocess.PIPE, stderr=errors, module="monarch._procs.agent.detached")
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline()
        # It goes on as nobody's child.
        process.wait()
        if not line:
            said = read_tail(errors, 4096).data.decode(errors="replace").strip().splitlines()
            raise SpawnError(
                f"the agent of the kept mesh {name!r} ended as it was started{': ' + said[-1] if said else ''}"
            )
    finally:
        os.close(errors)
    answer = msgspec.json.decode(line)
    if isinstance(answer, str):
        raise DetachedMeshInUseError(answer)
    record = find(name)
    try:
        kept, _ = _connect(record)
        _ask(kept._node, record.host, listen())
    except BaseException:
        # Nobody knows of it yet.
        if record.alive():
            os.kill(record.pid, signal.SIGTERM)
        raise
    return kept


def attach(name: str, timeout: float = _PATIENCE) -> DetachedMesh:
    """Make this program the controller of a kept mesh: what is there, and what was printed meanwhile, which is shown.

    Args:
        name: that it was kept by.
        timeout: seconds for its processes to answer, whatever their actors do.

    Raises:
        NotKeptError: there is none of that name, or its lease has ended.
        TakenError: another program has it attached; the text says which process.
        MonarchError: its record cannot be used; see ``records``.
    """
    kept, known = _connect(find(name))
    node, host = kept._node, kept._record.host
    try:
        _take(kept, known, timeout)
    except BaseException:
        # Another try, or another program, may have it.
        need_session(node).forget(host)
        raise
    return kept


def end(name: str) -> None:
    """End a kept mesh, which no other program may have attached.

    Raises:
        NotKeptError: there is none of that name.
        TakenError: another program has it attached.
    """
    record = find(name)
    known: DetachedMesh | None = _session().kept.get(record.host)
    (known or _connect(record)[0]).end()


def _session() -> Session:
    session: Session | None = session_of(open_node())
    if session is None:
        raise MonarchError("only the program itself keeps and attaches meshes, not one of its ranks")
    return session


def _connect(record: Record) -> tuple[DetachedMesh, dict[str, Any]]:
    """Become the controller of a host that is kept; with what its agent says that there is."""
    session = _session()
    node, host = session.node, record.host
    if host in session.kept:
        raise DetachedMeshInUseError(f"the kept mesh {record.name!r} is attached in this program already")
    keys = KeyPair(record.public.encode(), record.secret.encode())
    session.forget(host)
    session.listen(KeyPair.new(), _HERE, [record.public])
    try:
        listening = session.greet(record.address, keys, _PATIENCE)
    except SpawnError:
        raise NoDetachedMeshError(
            f"the kept mesh {record.name!r} does not answer at {record.address} within {_PATIENCE:g} s; process "
            f"{record.pid} keeps it"
        ) from None
    # What it has said before to this program, if that had it attached, is no news.
    session.forget_peers(host)
    try:
        if host_of(listening.src) != host:
            raise MonarchError(f"at {record.address} there is {listening.src}, and not the kept mesh {record.name!r}")
        known = _ask(node, host, claim(os.getpid()))
        assert node.hosts.keys is not None
        session.attach([listening], node.hosts.keys, _HERE, own=False)
    except BaseException:
        session.forget(host_of(listening.src))
        raise
    kept = session.kept[host] = DetachedMesh(record, node)
    kept.book, kept.dropped = known["book"], known["dropped"]
    return kept, known


def _take(kept: DetachedMesh, known: dict[str, Any], timeout: float) -> None:
    """Make meshes of what is there, and has the ranks belong to this program."""
    node, host = kept._node, kept._record.host
    output = need_session(node).output
    # What a program before has shown is not to be shown again, and its end not taken for a loss.
    output.know({(proc, stream): offset for proc, stream, offset in known["passed"]})
    _ask(node, host, listen())
    output.flush()
    deadline = time.monotonic() + timeout
    asked = [(proc, ask_proc(proc, adopt, node.proc, known["former"])) for proc, _ in known["procs"]]
    where: dict[str, list[str]] = {}
    for proc, answer in asked:
        try:
            _, keys = answer.get(max(0.0, deadline - time.monotonic()))
        except CallTimeoutError:
            kept.problems.append(f"process {proc} does not answer, as code of C holds it; attach again when it is done")
        except MonarchError as error:
            kept.problems.append(f"process {proc} was lost meanwhile: {error}")
        else:
            for key in keys:
                where.setdefault(key, []).append(proc)
    alive = [proc for proc, _ in known["procs"]]
    for order, told in known["orders"]:
        spawn = m.decode(order)
        assert isinstance(spawn, m.Spawn)
        _add_procs(kept, spawn, told, alive)
    for key, procs in where.items():
        _add_actors(kept, key, procs, max(1.0, deadline - time.monotonic()))


def _add_procs(kept: DetachedMesh, order: m.Spawn, told: bytes, alive: list[str]) -> None:
    """Return the mesh of procs that was ordered so."""
    node, host = kept._node, kept._record.host
    config: RankConfig = loads(order.config)
    procs = config.procs
    procs.owner = node.proc
    if not meshes_of(node).own_procs:
        # Nobody has that of this program yet, so it may be theirs: with it buffers are read and written.
        node.hosts.secret = config.secret
    # Where the program has died before it could tell, all ranks are alike.
    how = loads(told) if told else (order.env, {}, 0, {}, None)
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
        meshes_of(node).joined.tell(procs.uid, rank, procs.proc(rank))
    kept.procs.append(whole_of(shared, node))
    for rank in procs.region().base_ranks():
        # Asks to be told of its death, be it long ago.
        node.peers.get(procs.proc(rank))


def _names(procs: list[str], prefix: str) -> list[str]:
    """Of procs, the names that begin so."""
    return [name for name in (proc.partition("/")[2] for proc in procs) if name.startswith(prefix)]


def _add_actors(kept: DetachedMesh, key: str, procs: list[str], timeout: float) -> None:
    """Return the mesh of actors of a key, which some procs have said to have."""
    node = kept._node
    try:
        whole, body, buffers = ask_proc(procs[0], spec_of, key).get(timeout)
        spec: ActorSpec = make_spec(body, buffers)
    except MonarchError as error:
        kept.problems.append(f"actors {key.rpartition('-')[0]!r} cannot be used here: {error}")
        return
    spec.owner, spec.owner_actor = node.proc, ""
    if spec.whole:
        spec.region = spec.procs.region()
    state = ActorsState(key, spec.name, spec.cls, spec.procs, spec.region, True)
    state.initialized = Ready(node, spec.name, None)
    # Without its arguments an actor cannot be made again.
    state.spec = spec if whole else None
    mesh = ActorMesh(state, spec.region, node)
    meshes_of(node).add_actors(key, mesh)
    meshes_of(node).owners[key] = ""
    if spec.cls is Runner:
        shared = meshes_of(node).own_procs.get(spec.procs.uid)
        if shared is not None:
            shared.runner = mesh
    else:
        kept.actors.append(mesh)


def _ask(node: Node, host: str, asked: AgentRequest) -> Any:
    """Have the agent of a kept mesh do something, and waits for its answer."""
    answer = _Answer(node, host, asked.name)
    node.peers.get(f"{host}/agent").send(asked.frame(node.proc, answer.port))
    return answer.get(_PATIENCE)


class _Answer(Future[Any]):
    """What an agent answers."""

    __slots__ = ("_agent", "_reply", "port")

    def __init__(self, node: Node, host: str, service: str) -> None:
        super().__init__(node, f"the agent of the kept mesh ({service})")
        self._agent = f"{host}/agent"
        self._reply: m.Reply | None = None
        self.port = node.ports.open(self)

    targets: Any = ()

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """It has answered."""
        self._reply = reply
        self._node.ports.close(self.port)
        self._complete()

    def lost(self, peer: Any, dead: m.Dead) -> bool:
        """It may be the agent that has died."""
        if self.done or peer.proc != self._agent:
            return False
        self._node.ports.close(self.port)
        self._complete()
        return True

    def _make(self) -> Any:
        if self._reply is None:
            raise NoDetachedMeshError("the kept mesh has ended meanwhile")
        if self._reply.status == m.RESULT:
            return m.unpack(self._reply.body)
        failure = unpack_failure(self._reply.body)
        raise (DetachedMeshInUseError if failure.kind == DetachedMeshInUseError.__name__ else MonarchError)(
            failure.text
        )
