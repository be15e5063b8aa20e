"""Get hosts from a launcher, wait for them and attach them to the program."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.region import Region
from monarch._meshes.host_mesh import HostMesh, attached
from monarch._node.current import open_node
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.interface import HostRequest, Joined, Launch, Launcher
from monarch._session.draining import Notices, Preemption
from monarch._session.launching.attachment import WORKER_S, Attachment
from monarch._session.launching.growing import Growth
from monarch._session.launching.reminder import Reminder
from monarch._session.launching.waiting import Tell, check_counts, wait_for_hosts
from monarch._session.local_agent import LATER, PRELOAD
from monarch._session.session import Session, session_of
from monarch._wire.keys import KeyPair
from monarch.exceptions import ArgumentError, MonarchError


@dataclass(frozen=True)
class LaunchedHosts:
    """Hosts that a launcher has started, attached to this program.

    Attributes:
        meshes: the hosts of each part, along the axis ``hosts``.
        launch: what the launcher holds of them.
        ids: the ids of the hosts.
        keys: the keys of this program.
        names: the names of the hosts, in the order of ``ids``.
        growth: the hosts that may join later.
        preemption: the notices that hosts are taken back.
    """

    meshes: dict[str, HostMesh]
    launch: Launch
    ids: tuple[str, ...]
    keys: KeyPair
    names: tuple[str, ...]
    growth: Growth
    preemption: Preemption

    @property
    def mesh(self) -> HostMesh:
        """The hosts of the only part."""
        (mesh,) = self.meshes.values()
        return mesh

    def late_hosts(self) -> HostMesh | None:
        """Return the hosts that have joined since the last call; None if none has. They end with the others."""
        late = tuple(self.growth.take())
        region = Region.full(Extent(("hosts",), (len(late),))) if late else None
        return HostMesh.of_hosts(late, region, open_node()) if region is not None else None


def launch_hosts(
    launcher: Launcher,
    count: int = 0,
    *,
    name: str = "",
    parts: Mapping[str, int] | None = None,
    at_least: int | None = None,
    keys: KeyPair | None = None,
    interface: str | None = None,
    timeout: float | None = None,
    silence: float | None = None,
    tell: Tell | None = None,
    advice: str = "",
    spare: int = 0,
) -> LaunchedHosts:
    """Ask a launcher for hosts, wait for them, and attach them. An interrupt cancels the request.

    Args:
        launcher: where the hosts come from.
        count: the number of hosts; 0 for all that the launcher names.
        name: the name of the mesh of hosts.
        parts: several meshes of hosts, with the number of hosts of each; None for one mesh of all.
        at_least: continue with this many hosts, if the others fail or take longer; they are attached when they come,
            see ``LaunchedHosts.late_hosts``. None for all. For one mesh only.
        keys: the keys of this program; None for new ones.
        interface: the address of this machine at which the hosts reach it; None for the one on the route to the first.
        timeout: the most seconds to wait for hosts that do not join; None for the launcher's own limits.
        silence: seconds without a heartbeat after which a host counts as lost; None for the default.
        tell: called with a line at each step of the wait, and before the end of the hosts' time, from another thread.
        advice: follows the line about a host that joins later.
        spare: how many of the hosts the caller leaves free; it needs more than these.

    Raises:
        SpawnError: a host has failed; the text names it and says what to do.
        ArgumentError: the numbers of hosts contradict each other.
        MonarchError: this process is a rank.
    """
    if at_least is not None and at_least < 1:
        raise ArgumentError(f"at_least: expected at least 1 host, got {at_least}")
    if at_least is not None and parts is not None and len(parts) > 1:
        raise ArgumentError(f"at_least: works with one mesh only, got {len(parts)} meshes")
    node = open_node()
    session = session_of(node)
    if session is None:
        raise MonarchError("only the program can attach hosts, not a rank")
    if silence is not None:
        node.hosts.lease = silence
    keys = keys or node.hosts.keys or KeyPair.new()
    # Before a scheduler is asked, where the number is known.
    check_counts(count, at_least, spare)
    agent = AgentConfig(
        "", "", node.proc, 0, 0, PRELOAD, owner_public=keys.public.decode(), lease=node.hosts.lease, later=LATER
    )
    show = tell or _say_nothing
    if timeout is not None and not timeout >= 0:
        raise ArgumentError(f"timeout: expected seconds, at least 0, got {timeout!r}")
    launch = launcher.ask(HostRequest(count, agent, name or "monarch", at_least or 0))
    ids: tuple[str, ...] = ()
    try:
        check_counts(launch.expected, at_least, spare)
        joined, failed = wait_for_hosts(session, launch, at_least, timeout, show)
        attachment = Attachment(session, launch, keys, interface, timeout or WORKER_S, show)
        ids = attachment.attach(joined)
        names = dict(zip(ids, [each.host for each in joined], strict=True))
        preemption = Preemption(node, names, show)
        notices = node.part(Notices)
        notices.subscribe(ids, preemption)

        def attach_late(late: Joined) -> str:
            (known,) = attachment.attach([late])
            names[known] = late.host
            notices.subscribe([known], preemption)
            return known

        growth = Growth(launch, attach_late, show, advice)
        if at_least is not None:
            growth.begin(node, len(joined), failed)
        else:
            launch.settle()
    except BaseException:
        session.release(ids, orderly=False)
        launch.end()
        raise

    sizes = dict(parts) if parts is not None and len(parts) > 1 else {name: len(ids)}
    release = _Release(session, launch, growth, len(sizes))
    meshes: dict[str, HostMesh] = {}
    at = 0
    for part, size in sizes.items():
        own = ids[at : at + size]
        meshes[part] = attached(own, node, partial(release.part, own), part)
        at += size
    launched = LaunchedHosts(meshes, launch, ids, keys, tuple(each.host for each in joined), growth, preemption)
    left = launch.left()
    if left is not None and tell is not None:
        Reminder(node, lambda: release.over, launch, tell).begin(left)
    return launched


class _Release:
    """The end of hosts that several meshes share: the launch ends with the last of them.

    Args:
        session: the session of this program.
        launch: that of the hosts.
        growth: the hosts that may join later, which end with the others.
        parts: the number of meshes.
    """

    def __init__(self, session: Session, launch: Launch, growth: Growth, parts: int) -> None:
        self._session = session
        self._launch = launch
        self._growth = growth
        self._lock = threading.Lock()
        self._parts = parts
        """Meshes that are not released yet. Under ``_lock``."""
        self.over = False
        """Whether the launch has ended. Set once."""

    def part(self, hosts: tuple[str, ...]) -> None:
        """Release the hosts of one mesh."""
        self._session.node.part(Notices).release(hosts)
        self._session.release(hosts)
        with self._lock:
            self._parts -= 1
            last = not self._parts
        if last:
            self.over = True
            self._session.release(self._growth.end())
            self._launch.end()


def _say_nothing(line: str, keep: bool) -> None:
    pass
