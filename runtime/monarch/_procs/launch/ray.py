"""The ray launcher: hosts of a Ray cluster, each an actor of Ray on another node, which holds the agent's input."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as default
from importlib import import_module
from typing import Any

import msgspec

from monarch._core.text.counts import count_text
from monarch._procs.launch.interface import Failed, HostRequest, HostRoute, Joined, News, Queued, Starting, count_of
from monarch._procs.launch.payload import BOOT, GRACE_S, order_of
from monarch._procs.launch.reports import HostReports, HostTask
from monarch.exceptions import ArgumentError, SpawnError

_LIMITS = {"connecting": 120.0, "python": 60.0, "agent": 60.0}
_READ_S = 2.0
"""Seconds that an actor waits for a line."""
_END_S = 5.0
_ANSWER_S = 5.0
"""Seconds for a cluster at a known address to accept a connection."""
_LOOK_S = 1.0
"""Seconds between requests for the nodes of the cluster."""
_AGAIN_S = 10.0
"""Seconds until a host that has failed is asked for again."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
_CONNECT_S = 150.0
"""Seconds to wait for another launch that connects or disconnects; Ray takes more than a minute at most."""
_changed = threading.Condition()
_users = 0
"""Launches that use the connection that this module has opened. Under ``_changed``."""
_busy = False
"""Whether a launch connects or disconnects; Ray does so without a lock of ours. Under ``_changed``."""


@dataclass(frozen=True)
class RayLauncher:
    """Hosts of a Ray cluster.

    Attributes:
        count: the number of hosts if the request names none.
        address: the address of the cluster: ``auto``, ``ray://head:10001``, or ``local`` to start one here.
        cpus, gpus: to reserve on each host.
        resources: further resources to reserve on each host, by name.
        port: the port of each host's agent; 0 for a free one.
        env: environment variables of the hosts.
        grace: seconds that a host still has after SIGTERM.
        notice: a command that succeeds when the host is about to be taken back; empty for none.
        packages: a lock file to install on each host, or a packed environment there; empty for none.
    """

    count: int = 0
    address: str = "auto"
    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = default(default_factory=dict[str, float])
    port: int = 0
    env: Mapping[str, str] = default(default_factory=dict[str, str])
    grace: float = GRACE_S
    notice: str = ""
    packages: str = ""

    def __post_init__(self) -> None:
        wrong = {name: amount for name, amount in self.bundle(zeros=True).items() if amount < 0}
        if wrong:
            raise ArgumentError(f"ray: expected at least 0 of each resource, got {wrong}")
        if not self.bundle():
            raise ArgumentError("ray: expected a resource to reserve on each host, such as cpus=1, got none")

    def bundle(self, zeros: bool = False) -> dict[str, float]:
        """Return what to reserve on each host."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount or zeros}

    def ask(self, request: HostRequest) -> RayLaunch:
        """Ask for a placement group with each host on another node.

        Raises:
            SpawnError: Ray is not installed, or the cluster does not answer.
            ArgumentError: no number of hosts is given.
        """
        count = count_of("ray", request.count, self.count)
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise SpawnError("Ray is not installed here; install it with 'pip install ray'") from error
        own = _connect(ray, self.address, count)
        try:
            return RayLaunch(self, ray, count, request, own)
        except BaseException:
            _disconnect(ray, own)
            raise


def _connect(ray: Any, address: str, count: int) -> bool:
    """Connect to the cluster unless the program has; return whether the connection is ours."""
    global _users, _busy
    with _changed:
        if not _changed.wait_for(lambda: not _busy, _CONNECT_S):
            raise SpawnError(f"another launch of this program has been connecting to Ray for {_CONNECT_S:g} s; retry")
        if ray.is_initialized():
            _users += bool(_users)
            return _users > 0
        _busy = True
    opened = False
    try:
        _open(ray, address, count)
        opened = True
    finally:
        with _changed:
            _users += opened
            _busy = False
            _changed.notify_all()
    return True


def _open(ray: Any, address: str, count: int) -> None:
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    # Ray itself would try for more than a minute.
    _check_answer(known)
    try:
        if address == "local":
            _start_local(ray, count)
        else:
            ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if known or not isinstance(error, ConnectionError):
            raise SpawnError(f"no Ray cluster answers at {known or address!r}: {error}") from error
        # As ray.init() does without an address.
        _start_local(ray, count)


def _start_local(ray: Any, count: int) -> None:
    if count > 1:
        raise ArgumentError(
            f"ray: expected 1 host of a local Ray cluster, got {count}; for more, give the address of a cluster"
        )
    ray.init(address="local", include_dashboard=False, **_QUIET)


def _check_answer(address: str) -> None:
    machine, _, port = address.removeprefix("ray://").rpartition(":")
    if not machine or not port.isdecimal():
        return
    try:
        socket.create_connection((machine.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise SpawnError(
            f"no Ray cluster answers at {address!r}: {error}; start one with 'ray start --head', or use another address"
        ) from error


def _disconnect(ray: Any, own: bool) -> None:
    global _users, _busy
    if not own:
        return
    with _changed:
        _users -= 1
        # A launch that connects again counts itself at its end.
        if not _changed.wait_for(lambda: not _busy, _CONNECT_S) or _users:
            return
        _busy = True
    try:
        ray.shutdown()
    finally:
        with _changed:
            _busy = False
            _changed.notify_all()


def _actor_class() -> type[Any]:
    """Return the class of the actors. Local, so that Ray sends its code: nodes need not have this package."""

    class Host:
        """Holds the process that becomes the host agent."""

        def __init__(self) -> None:
            import queue

            self._process: Any = None
            self._lines: Any = queue.SimpleQueue()

        def start(self, boot: str, order: bytes) -> str:
            import os
            import subprocess
            import sys
            import threading

            process: Any = subprocess.Popen(
                [sys.executable, "-u", "-c", boot],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A rank that calls ray.init() is a program of its own, and no part of this worker.
                env={
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("RAY_") or name.startswith("RAY_AUTH_")
                },
                start_new_session=True,
            )
            self._process = process

            def read() -> None:
                for line in process.stdout:
                    self._lines.put(line.decode(errors="replace").strip())
                self._lines.put(None)

            threading.Thread(target=read, name="monarch-launch", daemon=True).start()
            process.stdin.write(order)
            process.stdin.flush()
            return ""

        def read(self, timeout: float) -> str | None:
            """Return the next line; empty if none comes in time, None at the end."""
            import queue

            try:
                return self._lines.get(timeout=timeout)
            except queue.Empty:
                return ""

        def stop(self, timeout: float) -> None:
            import subprocess

            if self._process is not None:
                self._process.stdin.close()
                try:
                    self._process.wait(timeout)
                except subprocess.TimeoutExpired:
                    self._process.kill()

    return Host


class RayLaunch:
    """Hosts of a placement group, and those that may come later, each on a node of its own.

    Args:
        launcher: its settings.
        ray: the module.
        count: the number of hosts.
        request: what was asked for.
        own: whether the connection to the cluster ends with the hosts.
    """

    forwarded = False
    agent_here = False

    def __init__(self, launcher: RayLauncher, ray: Any, count: int, request: HostRequest, own: bool) -> None:
        self.expected = count
        self._ray = ray
        self._own = own
        self._ended = False
        self._lock = threading.Lock()
        placement: Any = import_module("ray.util")
        self._launcher = launcher
        self._first = min(request.at_least or count, count)
        """Hosts that are granted together."""
        self._group = placement.placement_group([launcher.bundle()] * self._first, strategy="STRICT_SPREAD")
        self._ready = self._group.ready()
        self._granted = self._trying = False
        self._told = ""
        self._actors: dict[int, Any] = {}
        """By index of the host."""
        self._nodes: dict[int, str] = {}
        """The nodes of hosts that are not of the group, by index."""
        self._reports: dict[int, HostReports] = {}
        self._reads: dict[Any, int] = {}
        self._again: dict[int, float] = {}
        """When hosts that have failed are asked for again, in monotonic seconds, by index."""
        self._look = 0.0
        """When the cluster is asked again for nodes, in monotonic seconds."""
        agent = msgspec.structs.replace(request.agent, one_port=True)
        # Ranks can call ray.init() to use the objects of this cluster.
        env = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **launcher.env}
        order = order_of(agent, placement.get_node_ip_address(), launcher)
        self._order = replace(order, env=env).encode()

    def watch(self, timeout: float) -> Sequence[News]:
        """Return what happened since the last call; wait up to ``timeout`` seconds for it."""
        if not self._granted:
            done, _ = self._ray.wait([self._ready], timeout=timeout)
            if not done:
                return self._waiting()
            self._granted = True
            strategies: Any = import_module("ray.util.scheduling_strategies")
            for index in range(self._first):
                self._begin(index, strategies.PlacementGroupSchedulingStrategy(self._group, index))
            return [Starting(count_text(self._first, "host"))]
        news: list[News] = [*self._ask_nodes()]
        done: list[Any] = []
        if self._reads:
            done = self._ray.wait([*self._reads], timeout=timeout)[0]
        elif not news:
            time.sleep(timeout)
        for ref in done:
            index = self._reads.pop(ref)
            news += self._take(index, ref)
        for report in self._reports.values():
            news += report.overdue()
        self._note_failures(news)
        return news

    def _waiting(self) -> list[News]:
        alive = sum(node["Alive"] for node in self._ray.nodes())
        wanted = ", ".join(f"{name}: {amount:g}" for name, amount in self._launcher.bundle().items())
        reason = f"needs {self._first} nodes with {wanted} free; the cluster has {alive} nodes"
        changed = reason != self._told
        self._told = reason
        return [Queued("Ray placement group", reason)] if changed else []

    def _begin(self, index: int, strategy: Any) -> None:
        """Start the actor of a host."""
        remote = self._ray.remote(_actor_class())
        actor = self._actors[index] = remote.options(
            num_cpus=self._launcher.cpus,
            num_gpus=self._launcher.gpus,
            resources=dict(self._launcher.resources) or None,
            scheduling_strategy=strategy,
        ).remote()
        # Its first report says its name.
        self._reports[index] = HostReports([HostTask("", index)], _LIMITS)
        self._reads[actor.start.remote(BOOT, self._order)] = index

    def _ask_nodes(self) -> list[News]:
        """Start actors of hosts beyond the first ones on nodes that have come; return the news of that."""
        now = time.monotonic()
        missing = [index for index in range(self.expected) if self._is_missing(index, now)]
        if not missing or now < self._look:
            return []
        self._look = now + _LOOK_S
        strategies: Any = import_module("ray.util.scheduling_strategies")
        begun = 0
        for index, node in zip(missing, self._free_nodes(), strict=False):
            self._nodes[index] = node
            self._again.pop(index, None)
            self._begin(index, strategies.NodeAffinitySchedulingStrategy(node, soft=False))
            begun += 1
        return [Starting(count_text(begun, "more host"))] if begun else []

    def _is_missing(self, index: int, now: float) -> bool:
        report = self._reports.get(index)
        return report is None or (report.tasks[0].phase == "failed" and now >= self._again.get(index, now + 1))

    def _free_nodes(self) -> list[str]:
        """Return the ids of the nodes that could be a host and are none."""
        util: Any = import_module("ray.util")
        used = {*util.placement_group_table(self._group)["bundles_to_node_id"].values()}
        used |= {node for index, node in self._nodes.items() if self._reports[index].tasks[0].phase != "failed"}
        wanted = self._launcher.bundle()
        return [
            node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in used
            and all(node["Resources"].get(name, 0) >= amount for name, amount in wanted.items())
        ]

    def _note_failures(self, news: Sequence[News]) -> None:
        if self._trying and any(isinstance(each, Failed) for each in news):
            for index, report in self._reports.items():
                if report.tasks[0].phase == "failed":
                    self._again.setdefault(index, time.monotonic() + _AGAIN_S)

    def _take(self, index: int, ref: Any) -> list[News]:
        report = self._reports[index]
        try:
            line: str | None = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()
            return self._failed(report, f"its Ray actor died: {text[-1] if text else error}")
        if line is None:
            return self._failed(report, f"its Python ended: {'; '.join(report.words[-2:]) or 'without output'}")
        news = [*report.take(line)] if line else []
        if report.pending:
            self._reads[self._actors[index].read.remote(_READ_S)] = index
        return news

    def _failed(self, report: HostReports, reason: str) -> list[News]:
        for task in report.pending:
            task.host = task.host or f"Ray host {task.index}"
        return [report.fail(task, reason) for task in report.pending]

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return the address of an agent."""
        return HostRoute(joined.listening.owner_address)

    def settle(self) -> None:
        """End the actors of hosts that have not joined."""
        for index, report in self._reports.items():
            if any(task.phase != "joined" for task in report.tasks):
                self._ray.kill(self._actors[index])

    def keep_trying(self) -> bool:
        """Ask again for hosts that fail, on any node that is free; return True."""
        self._trying = True
        return True

    def left(self) -> float | None:
        """Return None: Ray does not say."""
        return None

    def end(self) -> None:
        """End the agents, their actors and the placement group."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        ray, util = self._ray, import_module("ray.util")
        errors = (ray.exceptions.RayError, ray.exceptions.GetTimeoutError)
        stops = [actor.stop.remote(_END_S) for actor in self._actors.values()]
        with suppress(*errors):
            ray.wait(stops, num_returns=len(stops), timeout=_END_S + 1) if stops else None
        for actor in self._actors.values():
            with suppress(*errors):
                ray.kill(actor)
        with suppress(*errors):
            util.remove_placement_group(self._group)
        _disconnect(ray, self._own)


def make(where: str, count: int, options: Mapping[str, Any]) -> RayLauncher:
    """Return the launcher of ``ray``, or of ``ray:ADDRESS``."""
    known = dict(options)
    if where:
        known["address"] = where
    return RayLauncher(count=count, **known)
