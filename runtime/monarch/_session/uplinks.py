"""With many hosts, output, reports and news of starts come by way of a few agents, which merge them."""

from __future__ import annotations

from monarch._node.node import Node
from monarch._node.spreads import Gateway, is_settled
from monarch._procs.session_folder import host_of
from monarch._session.output import OutputView
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
        node: of this program.
        output: takes output.
    """

    def __init__(self, node: Node, output: OutputView) -> None:
        self._node = node
        self._output = output
        self._ways: dict[str, tuple[Gateway, str]] = {}
        """By host, its connection and the agent by way of which it was told to send; the agent is empty for none."""
        self._last: dict[str, int] = {}
        """By host, the number of the last message that was handled, other than output, whose offsets tell."""
        self._arrived: dict[str, int] = {}
        """By agent, the number of its newest message, of which it must be told."""
        self._waits = False
        """Whether hosts will be looked at again."""
        node.dispatch.handle(m.Merged, lambda merged, _: self._on_merged(merged))
        node.dispatch.handle(m.Upward, lambda upward, _: self._on_upward(upward))

    # The ways

    def arrange(self) -> None:
        """Find ways for hosts that were attached, and others for those of a lost host; from any thread."""
        if self._node.hosts.spreads.least:
            self._node.receive_loop.post(self._arrange)

    def _arrange(self) -> None:
        complete = True
        for group in self._node.hosts.spreads.groups():
            # Messages to all hosts go by the first one as well, and so do their answers.
            first = group[0]
            via = f"{first.host}/agent" if len(group) > 1 else ""
            if not is_settled(first):
                complete = False
                continue
            for gateway in group:
                if is_settled(gateway):
                    self._tell(gateway, via)
                else:
                    complete = False
        if not complete and not self._waits:
            self._waits = True
            self._node.receive_loop.call_later(_AGAIN, self._look_again)

    def _look_again(self) -> None:
        self._waits = False
        if not self._node.closed:
            self._arrange()

    def _tell(self, gateway: Gateway, via: str) -> None:
        if self._ways.get(gateway.host, (gateway, "")) != (gateway, via):
            self._ways[gateway.host] = gateway, via
            self._node.hosts.spreads.send(gateway, [m.encode(m.Uplink(self._node.proc, via))])

    # Messages

    def _on_merged(self, merged: m.Merged) -> None:
        for output in merged.outputs:
            self._output.take_merged(output)
        for host, number, body in merged.others:
            self._take(host, number, body)
        self._confirm(merged.src, merged.number)

    def _on_upward(self, upward: m.Upward) -> None:
        if upward.body:
            self._take(host_of(upward.src), upward.number, upward.body)
        self._confirm(upward.src, upward.number)

    def _take(self, host: str, number: int, body: bytes) -> None:
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
            dispatch.take(message)

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
