"""Notices broken connections to attached hosts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from monarch._node.node import Node
from monarch._node.peers import Gateway

_LOOK = 200
"""Milliseconds between checks for newly attached hosts; longer with many hosts, as each takes time."""


class HostWatch:
    """Watches the connections to all hosts, in one thread. Any thread may use it.

    Args:
        node: of this program.
        lost: called with the id of a host whose connection broke, in the receiving thread.
    """

    def __init__(self, node: Node, lost: Callable[[str], None]) -> None:
        self._node = node
        self._lost = lost
        self._watched: set[str] = set()
        """Ids of hosts; single operations only, which are atomic."""
        self._monitors: deque[tuple[str, Gateway, Any]] = deque()
        """Added by any thread, taken by the watching one."""
        self._host_joined = threading.Event()
        """Set by any thread when there is another monitor, cleared by the watching one."""
        self._watcher: threading.Thread | None = None
        """Started by the first thread that attaches hosts."""

    def watch(self, host: str) -> None:
        """Watch the connection to a host, unless it is watched."""
        gateway = self._node.hosts.gateway(host)
        if host in self._watched:
            return
        self._watched.add(host)
        self._monitors.append((host, gateway, gateway.monitor()))
        self._host_joined.set()
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._run, name="monarch-hosts", daemon=True)
            self._watcher.start()

    def forget(self, host: str) -> None:
        """Let a host be watched again, by a new connection."""
        self._watched.discard(host)

    def _run(self) -> None:
        watched: dict[Any, tuple[str, Gateway]] = {}
        poller = zmq.Poller()
        try:
            while not self._node.closed:
                while self._monitors:
                    host, gateway, monitor = self._monitors.popleft()
                    watched[monitor] = (host, gateway)
                    poller.register(monitor, zmq.POLLIN)
                if not poller.sockets:
                    # A poll of nothing returns at once.
                    self._host_joined.wait(_LOOK / 1000)
                    self._host_joined.clear()
                for monitor, _ in poller.poll(_LOOK * (1 + len(watched) // 256)):
                    host, gateway = watched[monitor]
                    poller.unregister(monitor)
                    if not gateway.closed.is_set():
                        self._node.receive_loop.post(partial(self._lost, host))
                for monitor in [monitor for monitor, (_, gateway) in watched.items() if gateway.closed.is_set()]:
                    # ZeroMQ blocks if it cannot deliver an event, so close this monitor after its link.
                    if monitor in poller:
                        poller.unregister(monitor)
                    del watched[monitor]
                    monitor.close(0)
        except zmq.ContextTerminated:
            pass
        finally:
            for monitor, (_, gateway) in watched.items():
                gateway.closed.wait(10)
                monitor.close(0)
            while self._monitors:
                _, gateway, monitor = self._monitors.popleft()
                gateway.closed.wait(10)
                monitor.close(0)
