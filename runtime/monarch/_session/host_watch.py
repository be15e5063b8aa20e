"""Notices broken connections to attached hosts."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from monarch._node.node import Node
from monarch._node.peers.gateway import Gateway
from monarch._python.threads import new_thread
from monarch._wire.links import Link

_LOOK = 200
"""Milliseconds between checks for newly attached hosts; longer with many hosts, as each takes time."""


class HostWatch:
    """Watches the connections to all hosts, in one thread. Any thread may use it.

    Args:
        node: the node of this program.
        lost: called with the id of a host whose connection broke, in the receiving thread.
    """

    def __init__(self, node: Node, lost: Callable[[str], None]) -> None:
        self._node = node
        self._lost = lost
        self._watched: set[str] = set()
        """Ids of hosts. Added under ``_lock``; removed in single operations."""
        self._monitors: deque[tuple[str, Gateway, Link, Any]] = deque()
        """Added by any thread, taken by the watching one."""
        self._lock = threading.Lock()
        self._waker = -1
        """Wakes the watching thread when there is another monitor; -1 before it runs and after. Lock: ``_lock``."""
        self._watcher: threading.Thread | None = None
        """Started under ``_lock`` by the first thread that attaches hosts."""

    def watch(self, host: str) -> None:
        """Watch the connection to a host, unless it is watched, or has none any more."""
        gateway = self._node.hosts.gateway(host)
        link = gateway.link
        with self._lock:
            if host in self._watched or not isinstance(link, Link) or gateway.closed.is_set():
                return
            try:
                monitor = link.monitor()
            except zmq.ZMQError:
                # The host was lost meanwhile.
                if link.closed:
                    return
                raise
            self._watched.add(host)
            self._monitors.append((host, gateway, link, monitor))
            if self._watcher is None:
                self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._watcher = new_thread("monarch-hosts", self._run)
                self._watcher.start()
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def forget(self, host: str) -> None:
        """Let a host be watched again, by a new connection."""
        self._watched.discard(host)

    def _tell(self, host: str, gateway: Gateway, link: Link) -> None:
        if gateway.link is link and not gateway.closed.is_set():
            self._lost(host)

    def _run(self) -> None:
        watched: dict[Any, tuple[str, Gateway, Link]] = {}
        poller = zmq.Poller()
        waker = self._waker
        poller.register(waker, zmq.POLLIN)
        try:
            while not self._node.closed:
                while self._monitors:
                    host, gateway, link, monitor = self._monitors.popleft()
                    watched[monitor] = (host, gateway, link)
                    poller.register(monitor, zmq.POLLIN)
                for monitor, _ in poller.poll(_LOOK * (1 + len(watched) // 256)):
                    if monitor == waker:
                        os.eventfd_read(waker)
                        continue
                    poller.unregister(monitor)
                    self._node.receive_loop.post(partial(self._tell, *watched[monitor]))
                for monitor in [monitor for monitor, (_, _, link) in watched.items() if link.closed]:
                    # ZeroMQ blocks if it cannot deliver an event, so close this monitor after its link.
                    if monitor in poller:
                        poller.unregister(monitor)
                    del watched[monitor]
                    monitor.close(0)
        except zmq.ContextTerminated:
            pass
        finally:
            with self._lock:
                self._waker = -1
                os.close(waker)
            left = [*watched.items()]
            while self._monitors:
                host, gateway, link, monitor = self._monitors.popleft()
                left.append((monitor, (host, gateway, link)))
            for monitor, (_, gateway, link) in left:
                if not link.closed:
                    # The last of a gateway closes with it.
                    gateway.closed.wait(10)
                monitor.close(0)
