"""Other hosts, as one process sees them: which it reaches, by which way, and what became of those that it lost."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

import zmq

from monarch._node.peers import Gateway
from monarch._procs.session_folder import ipc_address
from monarch._wire import messages as m
from monarch._wire.links import Link
from monarch._wire.tcp import LEASE_S
from monarch.exceptions import SupervisionError

if TYPE_CHECKING:
    from monarch._node.peers import Peer
    from monarch._node.rank_config import RankConfig
    from monarch._wire.keys import KeyPair


class Reach:
    """Mixin of the runtime: the ways to other hosts."""

    if TYPE_CHECKING:
        host: str
        agent: str
        folder: str
        hello: bytes
        config: RankConfig | None
        context: zmq.Context[zmq.Socket[bytes]]

        def peer(self, proc: str, starting: bool = False) -> Peer: ...

    def begin_reach(self) -> None:
        """Before anything is sent."""
        self._gateway_lock = RLock()
        # Made under _gateway_lock, by host.
        self._gateways: dict[str, Gateway] = {}
        self.hosts: dict[str, tuple[str, str]] = {}
        """Owner address and public key of the other hosts that this process talks to by itself."""
        self.lost_hosts: dict[str, m.Dead] = {}
        """How other hosts were lost, or ended. Leader only writes; an entry counts until the host is in ``hosts``."""
        self.keys: KeyPair | None = None
        self.lease = LEASE_S
        """Seconds of silence after which a host counts as lost."""

    def out_of_reach(self, host: str) -> m.Dead | None:
        """How a host was lost, or that it is not known; None if messages can be sent there.

        A rank sends by the agent of its own host, which answers for hosts that it does not reach.
        """
        if host == self.host or host in self.hosts or self.config is not None:
            return None
        known = self.lost_hosts.get(host)
        return known or m.Dead(host, f"is on host {host}, which this program has not attached", False, [])

    def gateway(self, host: str) -> Gateway:
        """The way to another host, which is not ``out_of_reach``; one only, since two would not keep the order."""
        gateway = self._gateways.get(host)
        if gateway is None:
            with self._gateway_lock:
                gateway = self._gateways.get(host)
                if gateway is None:
                    gateway = self._only_gateway(host, self._new_gateway(host))
        return gateway

    def _only_gateway(self, host: str, made: Gateway) -> Gateway:
        """The gateway to a host, with the lock held: a __del__ that ran meanwhile may have made another one."""
        gateway = self._gateways.setdefault(host, made)
        if gateway is not made:
            made.close()
        return gateway

    def _new_gateway(self, host: str) -> Gateway:
        agent = f"{host}/agent"
        if self.config is None and host != self.host:
            if self.keys is None or host not in self.hosts:
                why = self.out_of_reach(host)
                raise SupervisionError(f"nothing can be sent to host {host}: it {why.reason if why else 'is new'}")
            address, public = self.hosts[host]
            link = Link(self.context, address, self.hello, self.keys, public.encode(), self.lease)
            return Gateway(link, agent, True)
        return Gateway(Link(self.context, ipc_address(self.folder, self.agent), self.hello), agent, False)

    def adopt_gateway(self, host: str, link: Link) -> None:
        """Takes a connection that there is already as the way to another host."""
        self._gateways[host] = Gateway(link, f"{host}/agent", True)

    def has_met(self, host: str) -> bool:
        """Whether a host is or was in this session, as far as this process knows."""
        return host == self.host or host in self.hosts or host in self._gateways

    def address_of(self, host: str) -> str:
        """The address, without a port, at which another host is reached; empty if it is not known here."""
        address = self.hosts.get(host, ("", ""))[0]
        return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def to_agent(self, host: str, message: m.AnyMessage) -> None:
        """Sends to the agent of a host."""
        self.peer(f"{host}/agent").send(m.encode(message))
