"""The connections of a host agent to its owner and to other hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq

from monarch._core.causes import HostLost
from monarch._procs.agent.poll_loop import PollLoop
from monarch._procs.agent.ranks import AgentRanks
from monarch._procs.agent.routes.refusing import Refusing
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch.exceptions import ProtocolError


class AgentConnections(AgentRanks):
    """The connections of an agent to its owner and to other hosts, and what it does when one breaks."""

    loop: PollLoop
    refusing: Refusing
    closing: bool
    listening: m.Listening | None
    _handlers: dict[type, Callable[[Any, list[Any]], None]]

    def _receive_from(self, socket: zmq.Socket[bytes]) -> None:
        self.loop.watch(socket, lambda: self._receive(socket))

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        # A few at a time, so that no sender keeps the others waiting.
        for _ in range(200):
            try:
                frames = self.router.receive(socket)
            except zmq.Again:
                return
            if not frames[0]:
                continue
            try:
                self._handle(frames)
            except Exception as error:
                # A bad message must not end everyone's ranks.
                self._failed(frames, error)

    def _handle(self, frames: list[Any]) -> None:
        message = m.decode(frames[0])
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"unexpected {type(message).__name__} message for a host agent")
        handler(message, frames[1:])

    def _follow_links(self) -> None:
        for monitor in self.router.idle():
            if self.loop.watches(monitor):
                self.loop.unwatch(monitor)
            monitor.close(0)
        for monitor in self.router.monitors():
            if not self.loop.watches(monitor):
                self.loop.watch(monitor, partial(self._link_lost, monitor))

    def _link_lost(self, monitor: zmq.Socket[bytes]) -> None:
        self.loop.unwatch(monitor)
        name = self.router.lost(monitor)
        if name == self.owner and self.uplink.relayed:
            # It may have gone for good: then the agent on the way to it will, too.
            self.uplink.straight_lost()
        elif name and self.refusing.told(name):
            self.router.forget_address(name)
        elif name and self._may_reconnect(name):
            self._host_left(name)
            self._tell_owner(m.Parted(self.proc, self.host, name, True))
        elif name:
            self.router.forget_address(name)
            self._host_lost(name)

    def _look_at_owner(self) -> None:
        if self.router.owner_lost():
            self._owner_parted()

    def _owner_parted(self) -> None:
        # Without an owner, it was a program that is not served.
        if self.owner and not (self.uplink.relayed or self.uplink.orphan):
            self._owner_died()

    def _host_lost(self, name: str) -> None:
        if name == self.owner:
            self._owner_died()
            return
        self._forwarding.lost(name)
        self._host_left(name)
        for proc in self.children.watched_on(name):
            self._spread(m.Dead(proc, HostLost(name), False, []))
        self._parted(name)

    def _may_reconnect(self, name: str) -> bool:
        """Return whether all that was on a connection to a host is kept until it has arrived, for another one."""
        return bool(self.owner) and name != self.owner and not self.children.has_ties(name)

    def _host_left(self, name: str) -> None:
        """Send the controller itself what a host may not have passed on."""
        self.uplink.lost(name)
        self.spreading.lost(name)

    def _parted(self, host: str) -> None:
        if self.owner:
            # It may still be connected to both hosts.
            self._tell_owner(m.Parted(self.proc, self.host, host))

    def _owner_died(self) -> None:
        self.closing = True

    def _tell_owner(self, message: m.AnyMessage) -> bool:
        return self.router.send(self.owner, [m.encode(message)])

    def _on_hello(self, hello: m.Hello, _: list[Any]) -> None:
        if hello.version != m.VERSION:
            self.refusing.greeted(hello)
        elif not self.owner:
            self.owner = hello.proc
            self.refusing.pid = hello.pid
            if self.router.owner_monitor is not None:
                # It may have looked with another connection before, whose end is not that of the owner.
                self.router.owner_lost()
                if not self.router.own():
                    self._owner_died()
        elif hello.proc == self.owner and not self.router.own_too():
            self._owner_parted()

    def _on_dead(self, dead: m.Dead, _: list[Any]) -> None:
        """The agent of another host reports the death of its proc, or the controller the loss of a host."""
        if dead.proc == self.owner:
            # It counts this host as lost.
            self._owner_died()
            return
        if dead.proc.endswith("/agent"):
            self.spreading.lost(host_of(dead.proc))
            self.uplink.lost(host_of(dead.proc))
        self._spread(dead)

    def _on_uplink(self, uplink: m.Uplink, _: list[Any]) -> None:
        if uplink.src != self.owner:
            return
        waited, before = self.uplink.relayed or self.uplink.orphan, self.uplink.via
        self.uplink.on_uplink(uplink)
        if before not in ("", self.proc) and not uplink.via:
            # It may hang.
            self.spreading.avoid(before)
        if waited:
            self._take_back()

    def _take_back(self) -> None:
        """Live as long as the connections with the owner again, which has just connected."""
        self.router.hurries = ""
        if self.router.owner_monitor is None:
            self.router.connect(self.owner)
            return
        self.router.watched_by = self.owner
        # Earlier connections of it may have broken.
        self.router.owner_lost()
        if not self.router.own():
            self._owner_died()

    def _on_down(self, down: m.Down, frames: list[Any]) -> None:
        """Pass a message of the controller on to an agent that this one relays."""
        if not self.router.post(f"{down.host}/agent", frames):
            self._parted(down.host)

    def _on_hosts(self, hosts: m.Hosts, _: list[Any]) -> None:
        if hosts.token and self.owner not in hosts.hosts:
            # The end of the owner may not be processed yet.
            self._look_at_owner()
            if not self.closing:
                self.refusing.answer(hosts, self.owner)
            return
        self.router.learn(hosts)
        self._forwarding.found(hosts.hosts)
        if self.config.one_port and self.owner in hosts.hosts:
            # Its connection to the shared port is not told from those of others: watch the one back to it.
            self.router.connect(self.owner)
        self.router.watched_by = self.owner if self.router.owner_monitor is not None else ""
        if self.listening is not None and hosts.token and self.owner in hosts.hosts:
            # An owner that connected by address alone learns the agent's identity from this.
            self._tell(self.owner, msgspec.structs.replace(self.listening, token=hosts.token))

    def _on_listen(self, listen: m.Listen, _: list[Any]) -> None:
        allowed = [key.encode() for key in listen.allowed]
        listening = self.listen(listen.address, allowed[0], allowed)
        self._tell(listen.src, listening)

    def listen(self, address: str, owner: bytes, allowed: list[bytes]) -> m.Listening:
        """Bind for other hosts, and watch the connection of the owner if it is on another one."""
        listening = self.router.listen(address, owner, allowed, self.config.one_port)
        for socket in (self.router.owner_socket, self.router.peer_socket):
            assert socket is not None
            self._receive_from(socket)
        if self.config.listen:
            self.listening = listening
            if self.router.owner_monitor is not None:
                self.loop.watch(self.router.owner_monitor, self._look_at_owner)
        return listening
