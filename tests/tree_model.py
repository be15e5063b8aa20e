"""A program and agents of many hosts without sockets: all messages, connections and times are the model's.

The agents and the program's side are those of the package. A connection keeps the order of its messages, and loses the
last ones if it breaks; different connections do not wait for one another.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from monarch._core.causes import Cause, HostLost
from monarch._node.peers.hosts import HostConnections
from monarch._node.spreads import arrivals, gateway_like, outgoing
from monarch._node.spreads import hurrying as hurrying_module
from monarch._node.spreads import spreads as spreads_module
from monarch._node.spreads.spreads import Spreads
from monarch._procs.agent.agent import Agent
from monarch._procs.agent.merging import outputs_of
from monarch._procs.agent.routes import uplink as uplink_module
from monarch._procs.agent.routes.forwarding import Forwarding
from monarch._procs.agent.routes.refusing import Refusing
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.session_folder import host_of
from monarch._session.partition import Partitions
from monarch._session.routes import tree as tree_module
from monarch._session.routes.uplinks import Uplinks
from monarch._wire import messages as m

PROGRAM = "c/c1"
LEASE = 5.0
_LATENCY = 0.5
"""Seconds within which a message arrives."""


class Wire:
    """One connection, in one direction: the end that sends."""

    def __init__(self, world: World, src: str, dst: str, lost: Callable[[], None]) -> None:
        self.src, self.dst = src, dst
        self.waiting: deque[tuple[float, list[Any]]] = deque()
        self.open = True
        self._world = world
        self._lost = lost
        world.wires.append(self)
        if dst not in world.agents and dst != PROGRAM:
            # Refused.
            self.break_off()
        elif dst in world.agents and src == PROGRAM:
            world.agents[dst].router.events.append(("accepted", id(self)))
            world.later(0.0, lambda: world.run(dst, Agent._look_at_owner))

    @property
    def closed(self) -> bool:
        return not self.open

    def send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        if self.open:
            self.waiting.append((self._world.now, [frame, *more]))

    def close(self, linger_ms: int = 0) -> None:
        """Close it; what was sent arrives if there is time."""
        if self.open:
            self.open = False
            if not linger_ms:
                self.waiting.clear()
            self._world.later(_LATENCY + 0.1, self._leave)

    def break_off(self) -> None:
        """Lose some of the last messages; both ends learn of it, each at its time."""
        if not self.open:
            return
        self.open = False
        for _ in range(self._world.random.randrange(len(self.waiting) + 1)):
            self.waiting.pop()
        self._world.later(self._world.random.random() * 0.1, self._lost)
        self._world.later(self._world.random.random() * 0.1, self._leave)

    def _leave(self) -> None:
        if self in self._world.wires and self.waiting:
            self._world.later(0.05, self._leave)
        elif self in self._world.wires:
            self._world.wires.remove(self)
            if self.src == PROGRAM and self.dst in self._world.agents:
                self._world.agents[self.dst].router.events.append(("disconnected", id(self)))
                self._world.run(self.dst, Agent._look_at_owner)


class Monitor:
    """Stands for the socket that reports the loss of a connection."""

    def close(self, linger: int = 0) -> None:
        pass


class ModelRouter(Router):
    """The router of an agent, with the connections of the model."""

    def __init__(self, world: World, proc: str) -> None:
        self.world = world
        self.proc, self.host, self.folder = proc, host_of(proc), ""
        self.lease = LEASE
        self.authenticator = None
        self.watched_by, self.hurries = PROGRAM, ""
        self.owner_monitor: Any = object()
        self.source = -1
        self._hosts = {name: ("", "") for name in [*world.names, PROGRAM] if name != self.host}
        self._links: dict[str, Any] = {}
        self._lost: dict[Any, Any] = {}
        self._accepted: set[int] = set()
        self._owned: set[int] | None = None
        self._idle: list[Any] = []
        self._broken: set[str] = set()
        self.events: list[tuple[str, int]] = []

    def _local(self, proc: str) -> Any:
        return SimpleNamespace(send=lambda frame, more: self.world.rank(proc, [frame, *more]))

    def _remote(self, name: str) -> Any:
        link = self._links.get(name)
        if link is None:
            monitor = Monitor()
            lost = partial(self.world.run, self.proc, lambda agent: agent._link_lost(monitor))
            dst = name if name == PROGRAM else f"{name}/agent"
            link = self._links[name] = Wire(self.world, self.proc, dst, lost)
            self._lost[monitor] = (name, link)
        return link

    def lost(self, monitor: Any) -> str:
        return super().lost(monitor) if monitor in self._lost else ""

    def owner_lost(self) -> bool:
        lost = False
        for event, wire in self.events:
            if event == "accepted":
                self._accepted.add(wire)
                self._owned = self._owned or {*self._accepted}
            else:
                self._accepted.discard(wire)
                if self._owned is not None and wire in self._owned:
                    self._owned.discard(wire)
                    lost = lost or not self._owned
        self.events.clear()
        if lost:
            self._owned = None
        return lost


def make_agent(world: World, proc: str) -> Any:
    """Return an agent with one rank and without processes."""
    agent: Any = Agent.__new__(Agent)
    agent.config = SimpleNamespace(one_port=False)
    agent.proc, agent.host, agent.owner = proc, host_of(proc), PROGRAM
    agent.router = ModelRouter(world, proc)
    agent.loop = SimpleNamespace(unwatch=lambda _: None, watches=lambda _: False)
    agent._later = lambda seconds, action: world.later(seconds, lambda: world.run(proc, lambda _: action()))
    agent.children = children = cast(Any, SimpleNamespace)(
        get=lambda _: [],
        watched_on=lambda _: [],
        watchers=lambda _: set(),
        owned_by=lambda _: [],
        death_of=lambda _: None,
        has_ties=lambda _: world.ties,
    )
    agent.closing, agent.listening = False, None
    agent.refusing = Refusing(agent.router, agent._later)
    agent.uplink = AgentUplink(agent.router, agent._later, agent._owner_died)

    def failed(frames: list[Any], error: Exception) -> None:
        raise error

    agent.spreading = Spreading(agent.router, agent.uplink, agent._later, agent._handle, failed, agent._parted)
    agent._forwarding = Forwarding(
        agent.router, children, agent.spreading, agent.uplink, agent._later, agent._tell, agent._handle
    )
    agent._handlers = {
        m.Route: agent._on_route,
        m.Cast: agent._on_cast,
        m.Dead: agent._on_dead,
        m.Ordered: agent.spreading.on_ordered,
        m.Spread: agent.spreading.on_spread,
        m.Answers: agent.spreading.on_answers,
        m.Uplink: agent._on_uplink,
        m.Down: agent._on_down,
        m.Upward: agent.uplink.on_upward,
        m.Taken: agent.uplink.on_taken,
        m.Signal: agent._on_signal,
    }
    return agent


class World:
    """The program, the agents, and the time."""

    def __init__(self, hosts: int, seed: int, least: int = 3) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count().__next__
        self.wires: list[Wire] = []
        self.stopped: set[str] = set()
        self.ties = self.random.random() < 0.5
        """Whether ranks of all hosts send each other messages, which a broken connection loses."""
        self.blocked: set[tuple[str, str]] = set()
        """Pairs of agents of which the first does not reach the second."""
        self.names = [f"h{place}" for place in range(hosts)]
        self.agents: dict[str, Any] = {}
        self.given_up: set[str] = set()
        self.seen: dict[str, list[int]] = {name: [] for name in self.names}
        """By host, the calls that its rank has got."""
        self.called: dict[str, list[int]] = {name: [] for name in self.names}
        self.answers: dict[int, dict[str, int]] = {}
        """By call, how often each host has answered."""
        self.printed: dict[str, bytes] = {}
        self.shown: dict[str, bytes] = {}
        self.told: dict[str, list[int]] = {name: [] for name in self.names}
        self.noted: dict[str, list[int]] = {name: [] for name in self.names}
        self._calls = 0
        for name in self.names:
            self.agents[f"{name}/agent"] = make_agent(self, f"{name}/agent")
        self._make_program(least)

    def _make_program(self, least: int) -> None:
        self.hosts = hosts = HostConnections("c", "", b"", SimpleNamespace())  # pyright: ignore[reportArgumentType]
        hosts.keys = SimpleNamespace()  # pyright: ignore[reportAttributeAccessIssue]
        hosts.lease = LEASE
        hosts.spreads = spreads = Spreads(PROGRAM, hosts.gateways)
        spreads.later = self.later
        spreads.connect = self._connect
        spreads.lease = LEASE
        hosts.known = {name: ("", name) for name in self.names}
        hosts.connect_to = lambda host, where, hurries=True: self._connect(host)  # pyright: ignore
        self.handlers: dict[type, Any] = {}
        node: Any = SimpleNamespace(
            proc=PROGRAM,
            host="c",
            closed=False,
            hosts=hosts,
            dispatch=SimpleNamespace(handle=self.handlers.__setitem__, take=self.take),
            receive_loop=SimpleNamespace(call_later=self.later, post=lambda action: self.later(0.0, action)),
        )
        output: Any = SimpleNamespace(take_merged=lambda merged: [self.take(each) for each in outputs_of(merged)])
        self.uplinks = Uplinks(node, output, lambda host: None, lambda host: None)
        Partitions(node, self.give_up, self.uplinks.tree.parted)
        self.handlers[m.Received] = spreads.received
        gateways: list[Any] = [hosts.gateway(name) for name in self.names]
        spreads.group(gateways)
        spreads.least = least
        for gateway in gateways:
            spreads.send(gateway, [m.encode(m.Hosts({}))])
        self.uplinks.arrange()
        for agent in self.agents.values():
            agent._handlers[m.Hosts] = lambda hosts, more: None

    def _connect(self, host: str) -> Any:
        wire: Any = None

        def lost() -> None:
            gateway = self.hosts.gateways.get(host)
            if gateway is not None and gateway.link is wire and not gateway.closed.is_set():
                self.give_up(host, HostLost(host))

        wire = Wire(self, PROGRAM, f"{host}/agent", lost)
        return wire

    def give_up(self, host: str, cause: Cause) -> None:
        """As Session.host_lost."""
        self.given_up.add(host)
        self.uplinks.lost(host)
        self.hosts.known.pop(host, None)
        self.hosts.lose(host, cause, False)
        self.uplinks.arrange()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, self._number(), action))

    def run(self, proc: str, action: Callable[[Any], None]) -> None:
        """Let an agent act, unless it has died; a stopped one does so when it continues."""
        if proc in self.stopped:
            self.later(0.5, lambda: self.run(proc, action))
        elif proc in self.agents:
            agent = self.agents[proc]
            action(agent)
            if agent.closing:
                self.kill(proc)

    # What happens

    def print(self, agent: Any) -> None:
        """Let a rank print a line."""
        proc = f"{agent.host}/m.0"
        before = self.printed.get(proc, b"")
        data = self.random.choice([b"same\n", b"%d\n" % len(before)])
        self.printed[proc] = before + data
        output = m.Output(proc, "a", "f", PROGRAM, 1, [("stdout", len(before), data)])
        agent._handle([m.encode(m.Route(PROGRAM, 1)), m.encode(output)])

    def tell(self, agent: Any) -> None:
        """Let an agent send what has a number: a report, or what does not wait, small or large."""
        told = self.told[agent.host]
        told.append(len(told))
        size = self.random.choice([0, 0, 2000])
        kind = self.random.choice(["reports", "fault", "frames"])
        if kind == "reports":
            agent._tell(PROGRAM, m.Reports(agent.proc, float(told[-1]), []))
        elif kind == "fault":
            agent._tell(PROGRAM, m.Fault(agent.proc, "a", told[-1], b"x" * size))
        else:
            reply = m.encode(m.Reply(agent.proc, 1, told[-1], m.RESULT, 0, b"", None, 1))
            agent._handle([m.encode(m.Route(PROGRAM, 2)), reply, b"x" * size])

    def call(self, hosts: Sequence[str], size: int = -1) -> None:
        """Call the ranks of some hosts: one message to each, or one that goes from host to host; of any size if it is
        negative."""
        hosts = [host for host in hosts if not self.hosts.gateways[host].closed.is_set()]
        if not hosts:
            return
        self._calls += 1
        number = self._calls
        for host in hosts:
            self.called[host].append(number)
        self.answers[number] = {}
        port = number if self.random.random() < 0.7 else 0
        body = b"x" * (self.random.choice([0, 0, 0, 3000]) if size < 0 else size)
        call = m.encode(m.Call(PROGRAM, "a", "f", number, b"", "", port, body))
        far: list[Any] = [(self.hosts.gateways[host], [f"{host}/m.0"]) for host in hosts]
        if len(far) > 1:
            self.hosts.spreads.cast(far, port, [call])
        else:
            far[0][0].route(f"{hosts[0]}/m.0", [call])

    def rank(self, proc: str, frames: list[Any]) -> None:
        """A rank gets a message, and answers some time later."""
        call = m.decode(frames[0])
        assert isinstance(call, m.Call)
        host = host_of(proc)
        self.seen[host].append(call.port)
        size = 100_000 if self.random.random() < 0.05 else 0
        reply = m.encode(m.Reply(proc, call.port, int(host[1:]), m.RESULT, 0, b"x" * size))
        answer = [m.encode(m.Route(PROGRAM, 1)), reply]
        self.later(self.random.random() * 0.2, lambda: self.run(f"{host}/agent", lambda agent: agent._handle(answer)))

    def take(self, message: Any, more: Sequence[Any] = ()) -> None:
        """Handle a message to the program."""
        match message:
            case m.Output(src, pieces=[(_, offset, data)]):
                shown = self.shown.get(src, b"")
                assert offset <= len(shown), f"{src} lost what precedes {data!r}"
                self.shown[src] = shown + data[len(shown) - offset :]
            case m.Reports(src, now):
                self._note(src, int(now))
            case m.Fault(src, rank=number):
                self._note(src, number)
            case m.Reply(src, port=1, rank=number) if src.endswith("/agent"):
                assert len(more) == 1
                self._note(src, number)
            case m.Reply(src, port, rank):
                self._answered(port, f"h{rank}")
            case m.Batch(parts=parts):
                for frame in more:
                    self.take(m.decode(frame))
                assert len(parts) == len(more)
            case m.Folded(port=port, hosts=hosts, groups=groups):
                self.hosts.spreads.heard(hosts)
                for *_, ranges in groups:
                    for begin, end in zip(ranges[::2], ranges[1::2], strict=True):
                        for rank in range(begin, end):
                            self._answered(port, f"h{rank}")
                for frame in more:
                    self.take(m.decode(frame))
            case _:
                self.handlers[type(message)](message, more)

    def _note(self, src: str, number: int) -> None:
        if host_of(src) not in self.given_up:
            self.noted[host_of(src)].append(number)

    def _answered(self, number: int, host: str) -> None:
        if number in self.answers:
            # A second one is ignored by the real one too.
            self.answers[number][host] = self.answers[number].get(host, 0) + 1

    # What goes wrong

    def kill(self, proc: str) -> None:
        """End an agent: some of its last messages are lost; the others learn of it one by one."""
        if self.agents.pop(proc, None) is not None:
            for wire in [each for each in self.wires if proc in (each.src, each.dst)]:
                if wire.dst == proc:
                    wire.waiting.clear()
                wire.break_off()

    def stop(self, proc: str) -> None:
        """Stop an agent for so long that it counts as lost, and let it continue."""
        self.stopped.add(proc)

        def silence() -> None:
            for wire in [each for each in self.wires if proc in (each.src, each.dst)]:
                wire.break_off()

        self.later(LEASE, silence)
        # New connections to it are made by its kernel, but get no answer.
        self.later(2 * LEASE, silence)
        self.later(2 * LEASE + 1, lambda: self.stopped.discard(proc))

    def hang(self, proc: str, seconds: float) -> None:
        """Let an agent do nothing for some time, while its connections last."""
        self.stopped.add(proc)
        self.later(seconds, lambda: self.stopped.discard(proc))

    def break_some(self) -> None:
        """Break a connection of an agent to another one, or to the program while it needs none."""
        wires = [
            each
            for each in self.wires
            if each.open
            and each.src in self.agents
            and each.dst not in self.stopped
            and each.src not in self.stopped
            and (each.dst in self.agents or self.agents[each.src].uplink.relayed)
        ]
        if wires:
            self.random.choice(wires).break_off()

    # Time

    def deliver(self, wire: Wire) -> None:
        _, frames = wire.waiting.popleft()
        frames = [bytes(frame) for frame in frames]
        if wire.dst == PROGRAM:
            message: Any = m.decode(frames[0])
            self.take(message, frames[1:])
        else:
            self.run(wire.dst, lambda agent: agent._handle(frames))

    def step(self) -> bool:
        """Let a message arrive, or time pass; return whether anything is left."""
        ready = [
            each
            for each in self.wires
            if each.waiting and each.dst not in self.stopped and (each.src, each.dst) not in self.blocked
        ]
        late = [each for each in ready if each.waiting[0][0] < self.now - _LATENCY]
        if late:
            self.deliver(late[0])
        elif ready and (self.random.random() < 0.8 or not self._timers):
            self.deliver(self.random.choice(ready))
        elif self._timers:
            until = min([self._timers[0][0], *(each.waiting[0][0] + _LATENCY + 0.01 for each in ready)])
            self.now = max(self.now, until)
            if self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
        return bool(ready or self._timers)

    def settle(self, seconds: float) -> None:
        """Let everything arrive."""
        end = self.now + seconds
        while self.now < end and self.step():
            pass


@contextmanager
def model(hosts: int, seed: int, least: int = 3) -> Iterator[World]:
    """Yield a world whose time is that of the code."""
    clock = SimpleNamespace(monotonic=lambda: world.now if world is not None else 1000.0)
    world: World | None = None
    with (
        patch.object(spreads_module, "time", clock),
        patch.object(arrivals, "time", clock),
        patch.object(gateway_like, "time", clock),
        patch.object(outgoing, "time", clock),
        patch.object(hurrying_module, "time", clock),
        patch.object(uplink_module, "time", clock),
        patch.object(tree_module, "time", clock),
        patch.object(uplink_module, "LARGE", 1000),
        patch.object(spreads_module, "BULK", 2000),
        patch.object(arrivals, "BULK", 2000),
        patch.object(outgoing, "BULK", 2000),
    ):
        world = World(hosts, seed, least)
        yield world
