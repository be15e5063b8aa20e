"""Ordering and exactly-once delivery, without processes: a caller, an agent and ranks, in any interleaving."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core.causes import Signaled
from monarch._core.flow import WINDOW, Finished
from monarch._core.shapes.extent import Extent
from monarch._node.call_watch import NoWatch
from monarch._node.peers.peer import Peer
from monarch._node.peers.port_table import PortTable
from monarch._node.replies.gather import Gather
from monarch._node.waits import ProcessWaits
from monarch._procs.agent.reply_batches import ReplyBatches
from monarch._wire import messages as m
from monarch._wire.pickling import dumps
from monarch.exceptions import SupervisionError

CALLER = "x/c"


class ReceiveLoop:
    def __init__(self) -> None:
        self.notified: list[Any] = []
        self.later: list[Any] = []

    def notify(self, waiter: Any) -> None:
        self.notified.append(waiter)

    def wait(self, waiter: Any, timeout: float | None = None) -> bool:
        raise AssertionError("nobody waits here")

    def call_later(self, seconds: float, action: Any) -> None:
        """Time stands still until a test runs these: live processes answer before a call is abandoned."""
        self.later.append(action)


class Caller:
    """The part of a node that a Gather and a Peer need; it counts completions."""

    def __init__(self) -> None:
        self.receive_loop: Any = ReceiveLoop()
        self.waits = ProcessWaits(self.receive_loop)
        self.ports = PortTable()
        self.ports.opened.subscribe(self.ports.follow)
        self.ports.closed.subscribe(self.close)
        self.closed: list[int] = []
        self.watch = NoWatch()
        self.host = "x"
        self.names: dict[str, str] = {}

    def close(self, port: int) -> None:
        self.closed.append(port)

    def find_part(self, kind: type) -> None:
        """It has none."""

    def take(self, frames: list[bytes]) -> None:
        """A message from the agent."""
        message = m.decode(frames[0])
        if isinstance(message, m.Batch):
            at = 1
            for size in message.parts:
                self.take(frames[at : at + size])
                at += size
            assert at == len(frames)
        elif isinstance(message, m.Reply):
            sink = self.ports.sinks.get(message.port)
            if sink is not None:
                sink.reply(message, frames[1:])
        else:
            assert isinstance(message, m.Dead)
            peer = self.peers[message.proc]
            assert peer.dead is None, "died twice"
            peer.dead = message
            for sink in list(self.ports.gathers.values()):
                sink.lost(peer, message)

    peers: dict[str, Peer]


class World:
    """A caller, another host's agent and its ranks, with a queue in each direction."""

    def __init__(self, ranks: int) -> None:
        self.caller = Caller()
        node: Any = self.caller
        self.procs = [f"h/p.{rank}" for rank in range(ranks)]
        self.caller.peers = {proc: Peer(node, proc) for proc in self.procs}
        self.reply_batches = ReplyBatches("h/agent")
        self.known = set(self.procs)
        self.alive = set(self.procs)
        self.unreaped: list[str] = []
        self.to_agent: deque[tuple[list[str], m.Call]] = deque()
        self.to_rank: dict[str, deque[m.Call]] = {proc: deque() for proc in self.procs}
        self.from_rank: dict[str, deque[m.Reply]] = {proc: deque() for proc in self.procs}
        self.to_caller: deque[list[bytes]] = deque()
        self.handled: dict[str, list[int]] = {proc: [] for proc in self.procs}
        self.gathers: list[tuple[Gather[Any], list[str]]] = []

    def call(self, members: list[int]) -> None:
        node: Any = self.caller
        procs = [self.procs[rank] for rank in members]
        peers = [self.caller.peers[proc] for proc in procs]
        extent = Extent(("gpus",), (len(peers),))
        gather: Gather[Any] = Gather(node, peers, extent, "mesh", "method", lambda _, values: values)
        self.gathers.append((gather, procs))
        self.to_agent.append((procs, m.Call(CALLER, "a", "method", gather.port, b"", "", 0, b"")))
        gather.check()

    # What may happen next, each with whether it can

    def agent_takes_a_cast(self, _: int) -> None:
        if self.to_agent:
            procs, call = self.to_agent.popleft()
            there = [proc for proc in procs if proc in self.known]
            self.reply_batches.begin(CALLER, call.port, there)
            for proc in there:
                self.to_rank[proc].append(m.Call(*[getattr(call, name) for name in call.__struct_fields__]))

    def rank_handles(self, rank: int) -> None:
        proc = self.procs[rank % len(self.procs)]
        if proc in self.alive and self.to_rank[proc]:
            call = self.to_rank[proc].popleft()
            self.handled[proc].append(call.port)
            _, procs = self.gathers[call.port - 1]
            place = procs.index(proc)
            body = dumps(f"{proc} {call.port}")[0]
            self.from_rank[proc].append(m.Reply(proc, call.port, place, m.RESULT, 1, body))

    def agent_takes_a_reply(self, rank: int) -> None:
        """Messages that a rank sent before its death may come before or after the notice of it."""
        proc = self.procs[rank % len(self.procs)]
        if self.from_rank[proc]:
            reply = self.from_rank[proc].popleft()
            frames = [m.encode(reply)]
            batch = self.reply_batches.add(CALLER, reply.port, reply.src, list(frames))
            if batch is None:
                self.to_caller.append(frames)
            elif batch:
                self.to_caller.append([bytes(frame) for frame in batch])

    def rank_crashes(self, rank: int) -> None:
        proc = self.procs[rank % len(self.procs)]
        if proc in self.alive:
            self.alive.discard(proc)
            self.to_rank[proc].clear()
            self.unreaped.append(proc)

    def agent_reaps(self, _: int) -> None:
        if self.unreaped:
            proc = self.unreaped.pop(0)
            self.known.discard(proc)
            self.to_caller.append([m.encode(m.Dead(proc, Signaled(9), False, []))])
            for dst, _, batch in self.reply_batches.died(proc):
                assert dst == CALLER
                if batch:
                    self.to_caller.append([bytes(frame) for frame in batch])

    def caller_receives(self, _: int) -> None:
        if self.to_caller:
            self.caller.take(self.to_caller.popleft())

    def time_passes(self, _: int) -> None:
        later, self.caller.receive_loop.later = self.caller.receive_loop.later, []
        for action in later:
            action()

    def settle(self) -> None:
        """Let everything that can still happen happen."""
        while self.to_agent or self.unreaped or self.to_caller or any(self.from_rank.values()) or self._busy():
            self.agent_takes_a_cast(0)
            self.agent_reaps(0)
            for rank in range(len(self.procs)):
                self.rank_handles(rank)
                self.agent_takes_a_reply(rank)
            self.caller_receives(0)

    def _busy(self) -> bool:
        return any(self.to_rank[proc] for proc in self.alive)


STEPS = [
    World.agent_takes_a_cast,
    World.rank_handles,
    World.agent_takes_a_reply,
    World.agent_reaps,
    World.caller_receives,
    World.rank_crashes,
]


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_every_call_is_answered_or_failed_exactly_once(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    world = World(ranks)
    members = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    events = data.draw(
        st.lists(
            st.one_of(
                members,
                st.tuples(st.sampled_from(STEPS[:-1]), st.integers(0, 3)),
                st.tuples(st.sampled_from(STEPS), st.integers(0, 3)),
            ),
            max_size=60,
        )
    )
    for event in events:
        if isinstance(event, list):
            world.call(event)
        else:
            step, rank = event
            step(world, rank)
    world.settle()
    caller = world.caller
    # Each is done, once, and its port is closed; nothing is left anywhere.
    assert sorted(caller.closed) == list(range(1, len(world.gathers) + 1))
    assert not caller.ports.sinks
    assert not world.reply_batches._open
    notified = [id(waiter) for waiter in caller.receive_loop.notified]
    for gather, procs in world.gathers:
        assert gather.done
        assert notified.count(id(gather)) == 1
        try:
            values: list[Any] = gather.get()
            failed: set[int] = set()
        except SupervisionError as error:
            failed = set(error.ranks)
            results = error.results
            values = list(results.values()) if results is not None else [None] * len(procs)
            assert failed
        for place, proc in enumerate(procs):
            if place in failed:
                # Only for one that did die. It may have handled the call: that is unknown, and the error says so.
                assert proc not in world.alive
                assert values[place] is None
            else:
                assert values[place] == f"{proc} {gather.port}"
                assert gather.port in world.handled[proc]
    for handled in world.handled.values():
        # In the order sent, none twice.
        assert handled == sorted(set(handled))


@settings(deadline=None, max_examples=400)
@given(
    sent=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.sampled_from([*STEPS, World.time_passes]), st.integers(0, 3)), max_size=60),
)
def test_ranks_that_a_death_leaves_are_followed_to_their_end(
    sent: list[list[int]], steps: list[tuple[Any, int]]
) -> None:
    world = World(4)
    for members in sent:
        world.call(members)
    for step, rank in steps:
        step(world, rank)
        for gather, procs in world.gathers:
            running = {proc for proc in procs if proc in world.alive and gather.port not in world.handled[proc]}
            left = {peer.proc for peer in gather.waits_for()}
            assert running <= left <= set(procs), "a rank that runs the call is missing"
            assert not left or gather.port in world.caller.ports.gathers
    world.settle()
    world.time_passes(0)
    assert not world.caller.ports.sinks
    assert not any(gather.waits_for() for gather, _ in world.gathers)
    for gather, _ in world.gathers:
        assert gather.done
        # Its error names those without an answer, whatever they have done since.
        error = gather.exception()
        assert ("not answered by then" in str(error)) == bool(gather.unanswered)


@settings(deadline=None, max_examples=200)
@given(
    costs=st.lists(st.sampled_from([1, 2, 25, 700, 20_000]), min_size=1, max_size=300),
    replies=st.booleans(),
    data=st.data(),
)
def test_sender_waiting_for_room_always_gets_it(costs: list[int], replies: bool, data: st.DataObject) -> None:
    """And is never further ahead than the window and one message."""
    caller: Any = Caller()
    peer = Peer(caller, "h/p.0")
    receiver = Finished()
    said: deque[int] = deque()
    under_way: deque[int] = deque()
    finished = 0

    def handle() -> None:
        nonlocal finished
        done = under_way.popleft()
        finished += done
        if replies:
            said.append(receiver.report(done))
        elif total := receiver.due(done):
            said.append(total)

    def hear() -> None:
        if said:
            peer.finished(said.popleft())

    chance = data.draw(st.randoms(use_true_random=False))
    for cost in costs:
        while not peer.done:
            # All pending messages are handled in the end, and then there is room.
            assert under_way or said, "waits for ever"
            if under_way and (not said or chance.random() < 0.5):
                handle()
            else:
                hear()
        assert peer.window.take(cost)
        under_way.append(cost)
        assert peer.sent - finished <= WINDOW + cost
        if chance.random() < 0.3 and under_way:
            handle()
        if chance.random() < 0.3:
            hear()


def test_answers_while_a_call_is_given_up_count() -> None:
    """As the receiving thread takes them, while the thread that judges a failure ends the call."""
    for moment in ("before", "after"):
        world = World(2)
        world.call([0, 1])
        gather, _ = world.gathers[-1]
        ports = world.caller.ports
        replies = [m.Reply(f"h/p.{rank}", gather.port, rank, m.RESULT, 1, dumps(1)[0]) for rank in range(2)]
        pass_on = ports.pass_on

        def answers(
            port: int,
            rest: Any,
            replies: Any = replies,
            moment: str = moment,
            ports: Any = ports,
            pass_on: Any = pass_on,
        ) -> None:
            if moment == "after":
                pass_on(port, rest)
            for reply in replies:
                ports.sinks[port].reply(reply, ())
            if moment == "before":
                pass_on(port, rest)

        ports.pass_on = answers  # pyright: ignore[reportAttributeAccessIssue]  (a thread that comes in between)
        gather._give_up()
        assert gather.done and not gather.waits_for() and not ports.sinks


def test_abandoned_call_keeps_its_place_among_calls() -> None:
    world = World(2)
    for members in ([0, 1], [1]):
        world.call(members)
    world.rank_crashes(0)
    world.agent_reaps(0)
    world.caller_receives(0)
    world.time_passes(0)
    first, second = (gather for gather, _ in world.gathers)
    assert first.done and not second.done
    assert world.caller.ports.oldest_call_of("h/p.1") == first.port


def test_a_call_has_its_port_before_others_can_find_it() -> None:
    world = World(1)
    ports = world.caller.ports
    seen: list[bool] = []
    # As the receiving thread may, while another thread opens the port.
    ports.opened.subscribe(lambda port: seen.append(ports.gathers[port].port == port))
    world.call([0])
    assert seen == [True]


def test_port_that_is_followed_tells_its_end_once() -> None:
    ports = PortTable()
    ends: list[int] = []
    ports.closed.subscribe(ends.append)
    sink: Any = SimpleNamespace()
    followed, other = ports.open(sink), ports.open(sink)
    assert ports.follow(followed)
    for port in (followed, followed, other):
        ports.close(port)
    assert ends == [followed]
    # Closed before: its follower is told by the result.
    assert not ports.follow(other)
    ports.close(other)
    assert ends == [followed]


def test_ranks_with_one_answer_share_constants_only() -> None:
    world = World(3)
    for value, shared in (([1], False), (17, True)):
        world.call([0, 1, 2])
        gather, _ = world.gathers[-1]
        gather.reply_alike(m.Reply("h/p.0", gather.port, 0, m.RESULT, 1, dumps(value)[0]), range(3))
        first, second, third = gather.get()
        assert first == second == third == value and (first is second) == shared


def test_rank_without_answer_has_no_value_of_another() -> None:
    world = World(3)
    world.call([0, 1, 2])
    gather, _ = world.gathers[-1]
    for rank, value in ((0, [1]), (1, 17)):
        gather.reply(m.Reply(f"h/p.{rank}", gather.port, rank, m.RESULT, 1, dumps(value)[0]), ())
    gather._give_up()
    assert gather.get() == [[1], 17, None]
