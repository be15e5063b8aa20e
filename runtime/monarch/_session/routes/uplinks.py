"""With many hosts, messages of hosts come by way of a few agents, which merge output, reports and news of starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch._node.node import Node
from monarch._node.spreads.gateway_like import GatewayLike, is_settled
from monarch._procs.session_folder import host_of
from monarch._session.output import OutputView
from monarch._session.routes.tree import Tree
from monarch._wire import messages as m
from monarch.exceptions import ProtocolError

_AGAIN = 0.25
"""Seconds until hosts are looked at again that cannot reach one another yet."""
_CONFIRM = 0.2
"""Seconds after which agents are told what has arrived."""


class Uplinks:
    """Says which agent merges the messages of which hosts, and takes them. For the receiving thread, but for
    ``arrange``.

    Args:
        node: the node of this program.
        output: takes output.
        watch: watches the connection to a host.
        unwatch: watches it no more.
    """

    def __init__(
        self, node: Node, output: OutputView, watch: Callable[[str], None], unwatch: Callable[[str], None]
    ) -> None:
        self._node = node
        self._output = output
        self._routes: dict[str, tuple[GatewayLike, str]] = {}
        """By host, its connection and the agent by way of which it was told to send; the agent is empty for none."""
        self._relayed: set[str] = set()
        """Hosts that were told that this agent relays them."""
        self._turns: dict[str, int] = {}
        """By host, how often it was told a route."""
        self.tree = Tree(node, watch, unwatch, self._tell_straight, self.arrange)
        self._last: dict[str, int] = {}
        """By host, the number of the last message that was handled, other than output, whose offsets tell."""
        self._arrived: dict[str, int] = {}
        """By agent, the number of its newest message, of which it must be told."""
        self._waits = False
        """Whether hosts will be looked at again."""
        node.dispatch.handle(m.Merged, lambda merged, _: self._on_merged(merged))
        node.dispatch.handle(m.Upward, self._on_upward)
        node.dispatch.handle(m.Relayed, lambda relayed, _: self._on_relayed(relayed))

    # The ways

    def arrange(self) -> None:
        """Find ways for hosts that were attached, and others for those of a lost host; from any thread."""
        if self._node.hosts.spreads.least:
            self._node.receive_loop.post(self._arrange)

    def _arrange(self) -> None:
        if self._node.closed:
            return
        groups = self._node.hosts.spreads.groups()
        relayed = sum(map(len, groups)) >= self._node.hosts.spreads.least
        # Those that relay others are not relayed themselves before these have moved.
        busy = {*self.tree.parents.values()} if relayed else set[str]()
        complete = True
        for group in groups:
            # Messages to all hosts go by the first one as well, and so do their answers.
            first = group[0]
            if is_settled(first) and first.parent is None:
                via = f"{first.host}/agent" if len(group) > 1 else ""
                for gateway in group:
                    wants = relayed and gateway is not first and gateway.host not in busy
                    complete = self._arrange_one(gateway, first, via, wants) and complete
                complete = complete and busy.isdisjoint(gateway.host for gateway in group[1:])
            else:
                complete = False
                self.tree.straighten(first.host)
        if not complete and not self._waits:
            self._waits = True
            self._node.receive_loop.call_later(_AGAIN, self._look_again)

    def _look_again(self) -> None:
        self._waits = False
        if not self._node.closed:
            self._arrange()

    def _arrange_one(self, gateway: GatewayLike, first: GatewayLike, via: str, relayed: bool) -> bool:
        """Tell a host its way by the first one of its group; return whether it was ready for that."""
        if not is_settled(gateway):
            return False
        if gateway.parent is not None and not (relayed and gateway.parent is first):
            self.tree.straighten(gateway.host)
        if self.tree.may_relay(gateway.host, first.host):
            self._tell(gateway, via, relayed)
        return True

    def _tell(self, gateway: GatewayLike, via: str, relayed: bool) -> None:
        host = gateway.host
        if self._routes.get(host, (gateway, "")) != (gateway, via) or relayed != (host in self._relayed):
            self._tell_anyhow(gateway, via, relayed)

    def _tell_anyhow(self, gateway: GatewayLike, via: str, relayed: bool) -> None:
        host = gateway.host
        self._routes[host] = gateway, via
        (self._relayed.add if relayed else self._relayed.discard)(host)
        turn = self._turns[host] = self._turns.get(host, 0) + 1
        # Messages from now on may be sent again by another route.
        gateway.keeps = relayed
        self._node.hosts.spreads.send(gateway, [m.encode(m.Uplink(self._node.proc, via, relayed, turn))])

    def _tell_straight(self, gateway: GatewayLike) -> None:
        """Tell a host that there is a connection to it again."""
        self._tell_anyhow(gateway, "", False)
        self.arrange()

    def _on_relayed(self, relayed: m.Relayed) -> None:
        host = host_of(relayed.src)
        gateway = self._node.hosts.gateways.get(host)
        if gateway is None or gateway.closed.is_set() or relayed.turn != self._turns.get(host):
            return
        if relayed.via:
            parent = self._node.hosts.gateways.get(host_of(relayed.via))
            if parent is not None and parent.parent is None and not parent.closed.is_set():
                self.tree.relay(gateway, parent)
        elif gateway.parent is not None:
            self.tree.detour(host)
        else:
            self.tree.bar(host, host_of(self._routes[host][1]))
            self._tell_straight(gateway)

    def lost(self, host: str) -> None:
        """Connect to the hosts that one relays that is about to count as lost."""
        self.tree.lost(host)
        self._relayed.discard(host)

    # Messages

    def _on_merged(self, merged: m.Merged) -> None:
        for output in merged.outputs:
            self._output.take_merged(output)
        for host, number, body in merged.others:
            self._take(host, number, body)
        self._confirm(merged.src, merged.number)

    def _on_upward(self, upward: m.Upward, more: Sequence[Any]) -> None:
        if upward.body:
            self._take(host_of(upward.src), upward.number, upward.body, more)
        self._confirm(upward.src, upward.number)

    def _take(self, host: str, number: int, body: bytes, more: Sequence[Any] = ()) -> None:
        dispatch = self._node.dispatch
        try:
            message = m.decode(body)
        except ProtocolError as error:
            # The other messages are good.
            dispatch.mishaps.undecodable(error)
            return
        if isinstance(message, m.Output):
            # Its offsets tell what has come before.
            dispatch.take(message)
            return
        if number and number <= self._last.get(host, 0):
            # It came by another way.
            return
        self._last[host] = number or self._last.get(host, 0)
        if self._node.hosts.out_of_reach(host) is None:
            dispatch.take(message, more)
        else:
            # It may take the end of its connection for that of one which it needs no more, and live on.
            self.tree.refuse(host)

    def _confirm(self, agent: str, number: int) -> None:
        if not number:
            return
        if not self._arrived:
            self._node.receive_loop.call_later(_CONFIRM, self._confirm_all)
        self._arrived[agent] = max(number, self._arrived.get(agent, 0))

    def _confirm_all(self) -> None:
        arrived, self._arrived = self._arrived, {}
        for agent, number in arrived.items():
            gateway = self._node.hosts.gateways.get(host_of(agent))
            if gateway is not None and not gateway.closed.is_set():
                # Without a number of its own: its order does not matter, and its arrival is not told.
                gateway.link.send(m.encode(m.Taken(self._node.proc, number)))
