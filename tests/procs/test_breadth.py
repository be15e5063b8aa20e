"""What a program does for many hosts grows with the number of messages that it sends itself, not with the hosts."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from threading import Event
from typing import Any, cast

import pytest
import zmq

from monarch._node.peers.hosts import HostConnections
from monarch._node.peers.peer import GonePeer
from monarch._node.peers.port_table import PortTable
from monarch._node.spreads.spreads import Spreads
from monarch._procs.agent.folding import Folding, ranges_of
from monarch._procs.agent.routes.ordering import Ordering
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._telemetry.calls import LISTED, ProcessCalls
from monarch._wire import messages as m
from monarch._wire.keys import CurveAuthenticator, KeyPair
from monarch._wire.links import Link, make_context


class Sent:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, frame: bytes, more: Any = ()) -> None:
        self.messages.append(m.decode(frame))


class Gateway:
    """A connection to a host that gets messages by way of others."""

    def __init__(self, place: int) -> None:
        self.host = f"h{place}"
        self.link = Sent()
        self.arrived, self.last, self.due, self.group, self.settled, self.relay = 1, 1, 0, 0, 0.0, ""
        self.heard: list[int] = []
        self.keeps, self.kept, self.parent, self.spare = False, deque[Any](), None, None
        self.spreads: Any = None
        self.closed = Event()


def spreads_to(count: int) -> tuple[Spreads, list[Any]]:
    gateways: list[Any] = [Gateway(place) for place in range(count)]
    spreads = Spreads("h/c", {each.host: each for each in gateways})
    spreads.group(gateways)
    for each in gateways:
        each.settled = time.monotonic() - 1
    spreads.least = 2
    return spreads, gateways


def relays(gateways: list[Any]) -> dict[str, str]:
    """Return the host by way of which each host gets the newest message."""
    found: dict[str, str] = {}
    for each in gateways:
        for spread in each.link.messages:
            found.update({host: each.host for host, _ in m.unpack(spread.hosts)})
        each.link.messages.clear()
    return found


def test_messages_to_any_hosts_go_by_the_same_groups() -> None:
    spreads, gateways = spreads_to(100)
    pairs: set[tuple[int, int]] = set()
    for far in ([*range(100)], [*range(0, 100, 3)], [*range(99, 0, -1)], [*range(5, 60)]):
        spreads.cast([(gateways[place], ["p"]) for place in far], 7, [b"call"])
        ways = relays(gateways)
        assert len(ways) == len(far)
        assert len(set(ways.values())) <= 10
        pairs |= {(int(host[1:]), int(relay[1:])) for host, relay in ways.items()}
    assert all(host // 10 == relay // 10 for host, relay in pairs)


def test_way_of_repeated_calls_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spreads, gateways = spreads_to(16)
    far = [(each, ["p", "q"]) for each in gateways]
    packed: list[Any] = []
    monkeypatch.setattr(m, "pack", lambda value, pack=m.pack: packed.append(value) or pack(value))
    for _ in range(3):
        spreads.cast(far, 7, [b"call"])
    assert len(packed) == 4
    # Without one of them, it is another way.
    gateways[3].closed.set()
    spreads.cast(far, 7, [b"call"])
    last = {each.host: each.link.messages[-1] for each in gateways if each.link.messages}
    numbers = {host: spread.numbers for host, spread in last.items() if isinstance(spread, m.Spread)}
    assert numbers == {"h0": [5, 5, 5], "h4": [5] * 4, "h8": [5] * 4, "h12": [5] * 4}


def test_message_is_sent_straight_once() -> None:
    """Each step of a Stop looks again, while a large message is still on its way."""
    spreads, gateways = spreads_to(4)
    spreads.cast([(each, [f"{each.host}/m.0"]) for each in gateways], 0, [bytes(1 << 20)])
    (late,) = [each for each in gateways if each.host == "h3"]
    before = len(late.link.messages)
    for _ in range(3):
        spreads.avoid_way(late)
    assert len(late.link.messages) == before + 1


def test_large_messages_begin_at_few_hosts_in_turn() -> None:
    spreads, gateways = spreads_to(64)
    for _ in range(40):
        spreads.pass_on([(each, ["p"]) for each in gateways], b"piece")
    assert sum(bool(each.link.messages) for each in gateways) == 8


@pytest.mark.parametrize(
    ("ranks", "ranges"), [([], []), ([4], [4, 5]), ([2, 0, 1, 8, 9, 5], [0, 3, 5, 6, 8, 10]), ([1, 1, 2], [1, 3])]
)
def test_ranks_become_ranges(ranks: list[int], ranges: list[int]) -> None:
    assert ranges_of(ranks) == ranges


def test_equal_answers_of_many_hosts_leave_as_one_range() -> None:
    sent: list[Any] = []
    folding = Folding("a/agent", lambda seconds, action: None, lambda dst, frames: sent.append(m.decode(frames[0])))
    hosts = [f"h{place}/agent" for place in range(40)]
    folding.begin("h/c", 7, hosts)
    for place, host in enumerate(hosts):
        status, body = (m.ERROR, b"same failure") if place % 2 else (m.RESULT, b"same value")
        replies = [m.encode(m.Reply(f"r{rank}", 7, place * 8 + rank, status, 1, body)) for rank in range(8)]
        folding.add(host, "h/c", 7, place + 1, True, [1] * 8, replies, received=9)
    (folded,) = sent
    values, failures = folded.groups
    assert values == (m.RESULT, 1, b"same value", [end for at in range(0, 320, 16) for end in (at, at + 8)])
    assert failures[3] == [end for at in range(8, 320, 16) for end in (at, at + 8)]
    assert folded.hosts[3] == ("h3", 4, 9)


def told_of_three() -> tuple[Ordering, list[int], list[Any]]:
    """An agent that has three messages, and has told of all in an answer; the arrivals that it tells; its timers."""
    told: list[int] = []
    later: list[Any] = []
    ordering = Ordering("h/agent", lambda _, do: later.append(do), lambda _, received: told.append(received.number))
    for number in (1, 2, 3):
        ordering.take("h/c", number, lambda: None)
    assert ordering.told("h/c") == 3
    later.pop()()
    return ordering, told, later


def test_arrival_that_an_answer_tells_is_not_told_again() -> None:
    ordering, told, later = told_of_three()
    assert told == [1]
    ordering.take("h/c", 4, lambda: None)
    later.pop()()
    assert told == [1, 4]


def test_arrival_is_told_again_when_a_message_comes_twice() -> None:
    """The answer that told it was lost with the host that folds it, and the sender keeps the message."""
    ordering, told, later = told_of_three()
    told.clear()
    ordering.take("h/c", 2, lambda: None)
    later.pop()()
    assert told == [3]


class Routes:
    """The router of an agent that has lost the connection to a host."""

    proc = "h/agent"

    def knows(self, proc: str) -> bool:
        return not proc.startswith("lost/")

    def connect(self, name: str) -> None:
        raise KeyError(name)

    def send(self, dst: str, frames: list[Any]) -> bool:
        return True

    post = send


def test_message_by_way_of_a_lost_host_is_handled() -> None:
    """The host that folds the answers was suspended, and has continued."""
    given: list[Any] = []
    failed: list[Any] = []
    routes = cast("Any", Routes())
    spreading = Spreading(
        routes,
        AgentUplink(routes, lambda seconds, action: None),
        lambda seconds, action: None,
        lambda frames: given.append(m.decode(frames[0])),
        lambda frames, error: failed.append(error),
        lambda host: None,
    )
    spread = m.Spread("c/c", 7, "lost/agent", 0, m.pack([("h", ["h/m.0"])]), [1], [], 1)
    spreading.on_spread(spread, [b"call"])
    assert given == [m.Cast("c/c", ["h/m.0"], 7, 1)] and not failed


def test_inbox_for_many_hosts_sends_no_heartbeats() -> None:
    context = make_context()
    door = CurveAuthenticator(context)
    socket = context.socket(zmq.PULL)
    try:
        door.bind(socket, "tcp://127.0.0.1", KeyPair.new(), "controller", 5.0, heartbeats=False)
        assert socket.get(zmq.HEARTBEAT_IVL) == 0
        assert int(socket.get(zmq.BACKLOG)) >= 2000
    finally:
        socket.close(0)
        door.close()
        context.term()


def test_many_connections_share_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch._node.peers.hosts._TOGETHER", 2)
    hosts = HostConnections("h", "/nowhere", b"hello", make_context())
    hosts.keys = KeyPair.new()
    try:
        for place in range(5):
            hosts.known[f"h{place}"] = (f"tcp://127.0.0.1:{20000 + place}", hosts.keys.public.decode())
            hosts.gateway(f"h{place}")
        assert len(hosts._contexts) == 2
    finally:
        hosts.close(0)
        hosts.term()


def test_short_calls_to_many_ranks_leave_less_room_in_the_log() -> None:
    class Call:
        port, label, done, sent_at = 1, "bench.echo()", True, 0.0

        def __init__(self, count: int) -> None:
            self.targets = [GonePeer(cast("Any", None), f"h/m.{rank}") for rank in range(count)]

    calls = ProcessCalls({}, PortTable())
    few, many = Call(8), Call(256 * LISTED)
    for call in (few, many, few):
        calls.sent(call)
    assert [len(sent.ranks) for sent in calls._listed] == [8, 256 * LISTED]
    assert list(calls._passed) == [few.targets]


def test_connection_that_is_not_made_in_a_lease_is_lost() -> None:
    with socket.socket() as full, contextlib.ExitStack() as others:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            # Its kernel answers no more of them.
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        context, keys = make_context(), KeyPair.new()
        address = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        link = Link(context, address, b"", keys, keys.public, lease=0.3, hurries=True)
        monitor = link.monitor()
        assert monitor.poll(5000)
        link.close()
        monitor.close(0)
        context.term()


def test_router_keeps_the_address_of_the_next_program() -> None:
    router = Router.__new__(Router)
    router._hosts = {"h1": ("", ""), "h2": ("", ""), "c/c1": ("", ""), "d/c2": ("", "")}
    router._broken = {"h1", "h2"}
    router.forget(["h1"])
    assert [*router._hosts] == ["h1", "c/c1", "d/c2"]
    # No other host gets the id of one that is gone.
    assert router._broken == {"h1"}
