"""Hosts of a launcher: the wait for them, and their attachment to the program."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.region import Region
from monarch._core.text.counts import count_text
from monarch._meshes.host_mesh import HostMesh, attached
from monarch._node.current import open_node
from monarch._node.future import in_thread
from monarch._node.node import Node
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.interface import (
    Environment,
    Failed,
    HostRequest,
    Installing,
    Joined,
    Launch,
    Launcher,
    News,
    Queued,
    Starting,
)
from monarch._procs.session_folder import host_of
from monarch._session.draining import Notices, Preemption
from monarch._session.greeting import AgentAddress, Refusal, reasons_of_silence
from monarch._session.growing import Growth
from monarch._session.local_agent import LATER, PRELOAD
from monarch._session.session import Session, session_of
from monarch._wire.keys import KeyPair
from monarch._wire.messages import Listening
from monarch.exceptions import ArgumentError, MonarchError, SpawnError

LOOPBACK = "127.0.0.1"
_NAMED = 4
"""Workers that a line names."""
_STEP_S = 1.0
"""The longest wait for news, in seconds."""
_GRACE_S = 10.0
"""Seconds to wait for the other hosts when enough have joined."""
_WORKER_S = 30.0
_FIRST_S = 2.0
"""Seconds for the first worker alone."""
_WARN_S = (600.0, 120.0)
"""Seconds before the end of an allocation at which its user is warned."""
Tell = Callable[[str, bool], None]
"""Shows a line about the wait, and whether it still matters after it."""


@dataclass(frozen=True)
class Launched:
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
) -> Launched:
    """Ask a launcher for hosts, wait for them, and attach them. An interrupt cancels the request.

    Args:
        launcher: where the hosts come from.
        count: the number of hosts; 0 for all that the launcher names.
        name: the name of the mesh of hosts.
        parts: several meshes of hosts, with the number of hosts of each; None for one mesh of all.
        at_least: continue with this many hosts, if the others fail or take longer; they are attached when they come,
            see ``Launched.late_hosts``. None for all. For one mesh only.
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
        attachment = _Attachment(session, launch, keys, interface, timeout or _WORKER_S, show)
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
    launched = Launched(meshes, launch, ids, keys, tuple(each.host for each in joined), growth, preemption)
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


class Reminder:
    """Warnings before the hosts' time ends.

    Args:
        node: the node of this program.
        is_over: returns whether the hosts have ended.
        launch: that of the hosts.
        tell: shows a line.
    """

    def __init__(self, node: Node, is_over: Callable[[], bool], launch: Launch, tell: Tell) -> None:
        self._node = node
        self._is_over = is_over
        self._launch = launch
        self._tell = tell

    def begin(self, left: float) -> None:
        """Say how many seconds are left, and wait for the warnings."""
        self._tell(f"the allocation of the hosts ends in {_minutes(left)}", True)
        self._plan(left)

    def _plan(self, left: float) -> None:
        due = [left - before for before in _WARN_S if left > before]
        if due:
            self._node.receive_loop.call_later(min(due), self._start)

    def _start(self) -> None:
        if not self._is_over():
            in_thread(self._node, "host-time", self._warn)

    def _warn(self) -> None:
        left = self._launch.left()
        if left is None:
            return
        if left <= max(_WARN_S) + _STEP_S:
            self._tell(
                f"the allocation of the hosts ends in {_minutes(left)}; save what you need, for example "
                f"with %mesh checkpoint, or ask for more time",
                True,
            )
        # It may have been extended.
        self._plan(left - 1.0)


def check_counts(count: int, at_least: int | None, spare: int) -> None:
    """Compare numbers of hosts; a count of 0 is not known yet."""
    if count and at_least is not None and at_least > count:
        raise ArgumentError(
            f"at least {at_least} hosts are needed to start, but only {count} requested; request {at_least} or more, "
            f"or lower the minimum to {count}"
        )
    fewest = count if at_least is None else at_least
    if fewest and spare >= fewest:
        few = f"at least {fewest}" if at_least is not None else str(fewest)
        raise ArgumentError(
            f"{spare} spare {'host' if spare == 1 else 'hosts'} of {few} would leave none for ranks; "
            f"{f'keep at most {fewest - 1} spare, or ' if fewest > 1 else ''}request more hosts"
        )


def _say_nothing(line: str, keep: bool) -> None:
    pass


def wait_for_hosts(
    session: Session, launch: Launch, at_least: int | None, timeout: float | None, tell: Tell
) -> tuple[list[Joined], dict[str, Failed]]:
    """Return the hosts that have joined, in their order, and those that have failed, by name.

    Args:
        session: the session of this program.
        launch: that of the hosts.
        at_least: see ``launch_hosts``.
        timeout: likewise.
        tell: likewise.

    Raises:
        SpawnError: too few have.
    """
    joined: list[Joined] = []
    failed: list[Failed] = []
    needed = launch.expected if at_least is None else min(at_least, launch.expected)
    begun = enough = time.monotonic()
    while len(joined) + len(failed) < launch.expected:
        now = time.monotonic()
        if at_least is not None and len(joined) >= needed and now > enough + _GRACE_S:
            break
        if timeout is not None and now > begun + timeout:
            if len(joined) >= needed:
                break
            raise SpawnError(f"{len(joined)} of {launch.expected} hosts joined within {timeout:g} s")
        for news in launch.watch(_STEP_S):
            if isinstance(news, Joined):
                joined.append(news)
                enough = time.monotonic() if len(joined) <= needed else enough
                # A worker has not answered yet.
                if news.listening.src:
                    tell(f"joined {len(joined)} of {launch.expected}: {news.host}", False)
            elif isinstance(news, Failed):
                if all(_sentence(each) != _sentence(news) for each in failed):
                    tell(f"failed: {_sentence(news)}", True)
                failed.append(news)
            else:
                if isinstance(news, Starting) and launch.agent_here:
                    # The agent of this host imports torch too, so let it begin at the same time.
                    session.need_agent()
                for line in describe_news(news):
                    tell(line, False)
                if isinstance(news, Environment):
                    for remark in news.remarks:
                        tell(f"warning: {news.host}: {remark}", True)
    if failed and len(joined) < needed:
        raise SpawnError("\n".join(dict.fromkeys(_sentence(each) for each in failed)))
    return sorted(joined, key=lambda each: each.index), {each.host: each for each in failed}


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _sentence(failed: Failed) -> str:
    advice = f"; {failed.advice}" if failed.advice else ""
    # Agents of this machine, and hosts that a scheduler has not named.
    if not failed.host or failed.host.startswith("a host agent"):
        return f"{failed.host} {failed.reason}{advice}".strip()
    named = failed.host if failed.host.startswith("Ray host ") else f"host {failed.host}"
    return f"{named}: {failed.reason}{advice}"


def describe_news(news: News) -> list[str]:
    """Return lines about a step of the wait."""
    if isinstance(news, Queued):
        parts = [f"queued: {news.what}"]
        parts += [f"{news.ahead} pending ahead of it"] if news.ahead is not None else []
        parts += [f"expected start {time.strftime('%H:%M', time.localtime(news.start))}"] if news.start else []
        return [", ".join(parts) + (f" ({news.reason})" if news.reason else "")]
    if isinstance(news, Starting):
        return [f"starting: {news.host}"]
    if isinstance(news, Installing):
        return [f"installing {news.what} on {news.host or 'a host'} ({news.by})"]
    if isinstance(news, Environment):
        return [f"environment of {news.host}: Python {news.python}, torch {news.torch or 'of unknown version'}"]
    return []


class _Attachment:
    """The attachment of hosts that have joined.

    Args:
        session: the session of this program.
        launch: that of the hosts.
        keys: the keys of this program.
        interface: the address of this machine for them, if known.
        patience: seconds for a worker to answer.
        tell: called with a line at each step of the wait.
    """

    def __init__(
        self, session: Session, launch: Launch, keys: KeyPair, interface: str | None, patience: float, tell: Tell
    ) -> None:
        self._session = session
        self._launch = launch
        self._keys = keys
        self._interface = interface
        self._patience = patience
        self._tell = tell

    def attach(self, joined: Sequence[Joined]) -> tuple[str, ...]:
        """Attach hosts, and return their ids; those that it has connected to are released if it fails."""
        session = self._session
        # Before the lock: what tells may be code of the user.
        self._tell_of([each.host for each in joined if not each.listening.src])
        with session.one_attachment():
            before = {*session.node.hosts.known}
            greeted: list[Listening] = []
            try:
                return self._attach(joined, greeted)
            except BaseException:
                # Workers take nobody else while they belong to this program.
                new = [host for each in greeted if (host := host_of(each.src)) not in before]
                session.release([host for host in new if host in session.node.hosts.known], orderly=False)
                raise

    def _attach(self, joined: Sequence[Joined], greeted: list[Listening]) -> tuple[str, ...]:
        session, keys = self._session, self._keys
        here = self._here(joined)
        session.listen(keys, here, [each.listening.public for each in joined])
        local: list[str] = []
        if self._launch.forwarded:
            local = session.open_here(keys, here, [each.listening.public for each in joined])
        unknown = [AgentAddress(self._launch.connect(each, local).address) for each in joined if not each.listening.src]
        self._greet(unknown, greeted)
        workers = iter(greeted)
        listening: list[Listening] = []
        for each in joined:
            known = each.listening
            if not known.src:
                worker = next(workers)
                # Without the protocol, a worker is called by its address.
                session.node.hosts.names.setdefault(host_of(worker.src), each.host.removeprefix("tcp://"))
                listening.append(worker)
                continue
            route = self._launch.connect(each, local)
            if each.host not in known.owner_address:
                session.node.hosts.names[host_of(known.src)] = each.host
            if route.here:
                session.attach_forwarded(known, [route.here[address] for address in local])
            listening.append(Listening(known.src, route.address, known.peer_address, known.public))
        # Otherwise the agent of this host starts when something runs here, and is introduced then.
        session.attach(listening, keys, here, own=self._launch.agent_here)
        return tuple(host_of(each.src) for each in listening)

    def _greet(self, workers: Sequence[AgentAddress], greeted: list[Listening]) -> None:
        """Connect to workers, which say which hosts they are; SpawnError if one does not serve this program."""
        answers = self._answers(workers, greeted)
        refusals = [each for each in answers if isinstance(each, Refusal)]
        final = [f"worker at {each.address}: {each.reason}" for each in refusals if each.final]
        if final:
            raise SpawnError("\n".join(final))
        if refusals:
            raise SpawnError(
                "\n".join(
                    f"no worker answered at {each.address} within {self._patience:g} s: {why}"
                    for each, why in zip(refusals, reasons_of_silence(refusals), strict=True)
                )
            )
        _check_distinct(workers, greeted)

    def _answers(self, workers: Sequence[AgentAddress], greeted: list[Listening]) -> list[Listening | Refusal]:
        """Return the answers of workers; those that serve this program are added to a list as soon as they do.

        Of programs that want the same workers at the same moment, the one that gets the first of them gets all.
        """
        until = time.monotonic() + self._patience
        first = min(range(len(workers)), key=lambda at: workers[at].address, default=0)
        others = [*workers]
        if len(workers) > 1:
            (answer,) = self._session.greet([workers[first]], self._keys, min(self._patience, _FIRST_S))
            if isinstance(answer, Listening):
                greeted.append(answer)
                del others[first]
            elif answer.final:
                return [answer]
        # A first one that is silent may still be starting, so the others are asked meanwhile.
        answers = self._session.greet(others, self._keys, max(0.0, until - time.monotonic()))
        if greeted:
            answers.insert(first, greeted[0])
        greeted[:] = [each for each in answers if not isinstance(each, Refusal)]
        return answers

    def _tell_of(self, workers: Sequence[str]) -> None:
        if workers:
            names = [*workers[:_NAMED], *["others"] * (len(workers) > _NAMED)]
            text = f"waiting up to {self._patience:g} s for {count_text(len(workers), 'worker')}: {', '.join(names)}"
            self._tell(text, False)

    def _here(self, joined: Sequence[Joined]) -> str:
        if self._interface:
            return self._interface
        if self._launch.forwarded:
            return LOOPBACK
        return local_address(joined[0].listening.owner_address)


def _check_distinct(workers: Sequence[AgentAddress], answers: Sequence[Listening]) -> None:
    """Check that no two addresses are those of one worker, such as two names of a machine."""
    found: dict[str, str] = {}
    for worker, answer in zip(workers, answers, strict=True):
        first = found.setdefault(answer.src, worker.address)
        if first != worker.address:
            raise ArgumentError(f"{first} and {worker.address} are the same worker; name it once")


def local_address(address: str) -> str:
    """Return this machine's address on the route to another one.

    Raises:
        SpawnError: the address has no route.
    """
    machine, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only selects the route.
            probe.connect((machine, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise SpawnError(f"cannot resolve or reach the worker address {address!r}: {error}") from error
