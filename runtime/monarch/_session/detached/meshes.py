"""Detached meshes that this program has attached, and how it becomes their controller."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from monarch._core.causes import HostLost
from monarch._core.shapes.extent import Extent
from monarch._core.shapes.region import Region
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.host_mesh import HostMesh, SharedHosts
from monarch._meshes.inside import state_of
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._node.current import open_node
from monarch._node.node import Node
from monarch._node.services.asking import tell_agent
from monarch._procs.agent.detached_records import Record, RecordedHost, find
from monarch._procs.agent.services import claim, describe_procs, listen, note
from monarch._procs.launch.holding.held import HeldLaunch
from monarch._procs.os.posix import outlives
from monarch._procs.session_folder import host_of
from monarch._session.detached.agents import PATIENCE_S, ask_agent, ask_agents
from monarch._session.detached.greeting import UnavailableHosts, greet_here, greet_hosts
from monarch._session.draining import Notices, Preemption
from monarch._session.launching.attachment import LOOPBACK, local_address
from monarch._session.launching.reminder import Reminder
from monarch._session.launching.waiting import Tell
from monarch._session.session import Session, session_of
from monarch._wire.keys import KeyPair
from monarch._wire.pickling import dumps_whole
from monarch.exceptions import DetachedMeshInUseError, MonarchError, NoDetachedMeshError


class DetachedHosts(HostMesh):
    """The hosts of a detached mesh, or a view of them."""

    def spawn_procs(self, *args: Any, **kwargs: Any) -> ProcMesh:
        """Start processes as on any host; they and their settings are detached."""
        mesh = super().spawn_procs(*args, **kwargs)
        shared = state_of(mesh)
        starting = shared.starting
        assert starting is not None
        how = (starting.variables, dict(starting.of_ranks), starting.want_spares, shared.roles)
        description = dumps_whole((*how, shared.supervision.restart))
        for host in self._hosts:
            tell_agent(self._node, host, describe_procs(shared.procs.uid, description))
        return mesh


class DetachedMesh:
    """A detached mesh that this program has attached. It outlives the program until its lease ends.

    Attributes:
        name: its name.
        seconds: its lease without a program, in seconds.
        hosts: its host, or its hosts along the axis ``hosts``; processes spawned there outlive the program.
        procs: the process meshes that earlier programs spawned there.
        actors: the actor meshes on them.
        notes: the last ``note`` of this or an earlier program.
        dropped: bytes of output that were discarded while no program was attached.
        problems: descriptions of parts that could not be attached.
        lost_tensors: the most distributed tensors that a rank had of earlier programs: those are lost, since their
            names were in the program; variables of ranks are not.
        preemption: the notices that hosts are taken back; None for a mesh on this machine.
    """

    def __init__(self, record: Record, node: Node, hosts: Sequence[str], launch: HeldLaunch | None) -> None:
        self.name = record.name
        self.seconds = record.seconds
        self.procs: list[ProcMesh] = []
        self.actors: list[ActorMesh] = []
        self.notes = b""
        self.dropped = 0
        self.problems: list[str] = []
        self.lost_tensors = 0
        self.preemption: Preemption | None = None
        self.ids = tuple(hosts)
        """Of its hosts that have answered."""
        self.missing: list[RecordedHost] = []
        """Hosts that did not answer."""
        self._record = record
        self._node = node
        self._launch = launch
        self._over = False
        region = Region.full(Extent(("hosts",), (len(self.ids),))) if launch is not None else Region((), 0, (), ())
        self.hosts = DetachedHosts(self.ids, region, node, SharedHosts(self.end, region))

    def note(self, notes: bytes) -> None:
        """Store a note for the next program, replacing the previous one."""
        self.notes = notes
        for host in self.ids:
            if host in self._node.hosts.known:
                tell_agent(self._node, host, note(notes))

    def left(self) -> float | None:
        """Return the seconds until a scheduler takes the hosts back; None if it does not, or not known."""
        return self._launch.left() if self._launch is not None else None

    def lose_missing(self) -> None:
        """Report the hosts that did not answer as lost, with their ranks."""
        for host in self.missing:
            lost = partial(need_program().host_lost, host.id, HostLost(host.name))
            self._node.receive_loop.post(lost)

    def listen(self) -> None:
        """Take output from now on, the one kept so far first."""
        for host in self.ids:
            ask_agent(self._node, host, listen())

    def watch_hosts(self, tell: Tell) -> None:
        """Take notices that hosts are taken back, and warn before their time ends."""
        if self._launch is None:
            return
        names = {host.id: host.name for host in self._record.hosts}
        self.preemption = Preemption(self._node, names, tell)
        self._node.part(Notices).subscribe(self.ids, self.preemption)
        left = self._launch.left()
        if left is not None:
            Reminder(self._node, lambda: self._over, self._launch, tell).begin(left)

    def leave(self) -> None:
        """Detach from the mesh: its lease begins, and this program or another one may attach it."""
        self._release()
        for host in self._record.hosts:
            need_program().forget(host.id)
        if self._launch is not None:
            self._launch.leave()

    def lost(self) -> None:
        """Take note that no connection to its hosts is left. Called by the receiving thread."""
        self._over = True
        if self._launch is not None:
            # Their lease runs, and so must that of the process that holds them.
            self._launch.leave()

    @property
    def on(self) -> str:
        """The launcher of its hosts, such as ``slurm``; empty for a mesh on this machine."""
        return self._launch.where if self._launch is not None else ""

    @property
    def on_count(self) -> int:
        """How many hosts its launcher was asked for; 0 for all that it names."""
        return self._launch.count if self._launch is not None else 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of its launcher."""
        return dict(self._launch.options) if self._launch is not None else {}

    @property
    def attached(self) -> bool:
        """Whether this program still has it attached: the connection may have broken."""
        return not self._node.closed and any(need_program().detached.get(host) is self for host in self.ids)

    def end(self) -> None:
        """End the mesh: its processes, its record, and hosts that a launcher has got.

        Raises:
            DetachedMeshInUseError: the connection had broken, and another program has attached it.
        """
        record = self._record
        if not self.attached:
            with suppress(NoDetachedMeshError):
                found = find(self.name)
                if found.pid == record.pid and found.start == record.start:
                    end_recorded(found)
            return
        self._release()
        need_program().release([host for host in self.ids if host in self._node.hosts.known])
        if self._launch is not None:
            self._launch.end()
        if outlives(record.pid, record.start, PATIENCE_S):
            os.kill(record.pid, signal.SIGKILL)

    def _release(self) -> None:
        self._over = True
        if self.preemption is not None:
            self._node.part(Notices).release(self.ids)

    def __repr__(self) -> str:
        return f"<DetachedMesh {self.name!r} ({len(self.procs)} process meshes, {len(self.actors)} actor meshes)>"


def need_program() -> Session:
    """Return the session of this program.

    Raises:
        MonarchError: this process is a rank.
    """
    session: Session | None = session_of(open_node())
    if session is None:
        raise MonarchError("only the program can detach and attach meshes, not a rank")
    return session


def connect(
    record: Record, launch: HeldLaunch | None = None, ends: bool = False
) -> tuple[DetachedMesh, list[dict[str, Any]]]:
    """Become the controller of a detached mesh, and return the reports of the agents of its hosts.

    Args:
        record: its record.
        launch: the connection to the process that holds its hosts, if there is one already.
        ends: whether the caller ends the mesh: then hosts that do not answer end with it.

    Raises:
        DetachedMeshInUseError: a program has it attached, or is starting it.
        NoDetachedMeshError: none of its hosts is left, or it has just ended.
        MonarchError: none of its hosts answers.
    """
    session = need_program()
    with session.one_attachment():
        return _connect_alone(session, record, launch, ends)


def _connect_alone(
    session: Session, record: Record, launch: HeldLaunch | None, ends: bool
) -> tuple[DetachedMesh, list[dict[str, Any]]]:
    if any(host.id in session.detached for host in record.hosts):
        raise DetachedMeshInUseError(
            f"detached mesh {record.name!r} is already attached to this process; use the mesh that the first attach "
            f"returned"
        )
    if not record.holder:
        return _connect(session, record, None, ends)
    if launch is None:
        if not record.hosts:
            raise DetachedMeshInUseError(f"detached mesh {record.name!r} is being started by process {record.user}")
        try:
            launch = HeldLaunch(record.holder)
        except NoDetachedMeshError as error:
            raise NoDetachedMeshError(f"detached mesh {record.name!r} has ended: {error}") from None
    try:
        return _connect(session, record, launch, ends)
    except BaseException:
        launch.leave()
        raise


def end_recorded(record: Record) -> None:
    """End a detached mesh that no program has attached.

    Raises:
        DetachedMeshInUseError: another program has it attached.
    """
    known: DetachedMesh | None = next(
        (mesh for host in record.hosts if (mesh := need_program().detached.get(host.id)) is not None), None
    )
    try:
        mesh = known or connect(record, ends=True)[0]
    except DetachedMeshInUseError:
        raise
    except MonarchError:
        if not record.holder:
            raise
        # None of its hosts is left, or one was lost or stopped meanwhile: the process that holds them ends all.
        with suppress(NoDetachedMeshError):
            HeldLaunch(record.holder).end()
        return
    mesh.end()


def _connect(
    session: Session, record: Record, launch: HeldLaunch | None, ends: bool
) -> tuple[DetachedMesh, list[dict[str, Any]]]:
    node, keys = session.node, KeyPair(record.public.encode(), record.secret.encode())
    forwarded = launch is not None and launch.forwarded
    here = LOOPBACK if launch is None or forwarded else local_address(record.hosts[0].address)
    session.listen(KeyPair.new(), here, [record.public])
    assert node.hosts.keys is not None
    local = session.open_here(node.hosts.keys, here, [record.public]) if forwarded else []
    problems: list[str] = []
    missing: list[RecordedHost] = []
    unavailable = UnavailableHosts()
    try:
        for host in record.hosts:
            session.forget(host.id)
            if host.name and host.name not in host.address:
                node.hosts.names[host.id] = host.name
        if launch is None:
            known = [greet_here(session, record, keys)]
        else:
            known, unavailable = greet_hosts(session, record, keys, launch, local)
            missing, problems = unavailable.hosts, unavailable.problems()
        if launch is not None and not known:
            raise _gone(record, launch, unavailable, ends)
        for each in known:
            # Ignore earlier messages from it, if this program had it attached before.
            session.forget_peers(host_of(each.src))
        ids = [host_of(each.src) for each in known]
        pid, every = os.getpid(), [host.id for host in record.hosts]
        requests = {host: claim(pid, [other for other in every if other != host]) for host in ids}
        # Of two programs at the same moment, the one that gets the first host gets all.
        try:
            claims: list[dict[str, Any]] = ask_agents(node, {ids[0]: requests.pop(ids[0])})
            claims += ask_agents(node, requests)
        except NoDetachedMeshError as error:
            if launch is None:
                raise
            raise MonarchError(
                f"detached mesh {record.name!r} is still detached: a host was lost while attaching it; attach it again"
            ) from error
        session.attach(known, node.hosts.keys, here, own=forwarded, joins=False)
        if launch is not None:
            launch.stay()
    except BaseException:
        for host in record.hosts:
            session.forget(host.id)
        raise
    for host in missing:
        # Its ranks are known first, so that their meshes learn of the loss: see lose_missing.
        node.hosts.known[host.id] = (host.address, record.public)
    detached = DetachedMesh(record, node, ids, launch)
    detached.missing = missing
    for host in ids:
        session.detached[host] = detached
    detached.problems = problems
    detached.notes = next((each["notes"] for each in claims if each["notes"]), b"")
    detached.dropped = sum(each["dropped"] for each in claims)
    return detached, claims


def _gone(record: Record, launch: HeldLaunch, unavailable: UnavailableHosts, ends: bool) -> MonarchError:
    """Return the error about a mesh of which no host answers; what is left of it ends if nothing can come back."""
    problems = "; ".join(unavailable.problems())
    if unavailable.all_ended or ends:
        launch.end()
        return NoDetachedMeshError(
            f"detached mesh {record.name!r} has ended, because none of its hosts answers: {problems}"
        )
    return MonarchError(
        f"detached mesh {record.name!r} cannot be attached now: {problems}; %mesh down {record.name}, or "
        f"'kill -9 {record.pid}', ends it with its hosts"
    )


def say_nothing(line: str, keep: bool) -> None:
    """Show nothing."""
