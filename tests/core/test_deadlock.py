"""Deadlock detection between actors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core.deadlock import Deadlock, PendingRequest, Probe, State, WaitGraph

Actor = tuple[str, str]
"""Process and key."""
Begun = tuple[int, list[PendingRequest]]
"""A wait and its requests."""


def hop(source: Actor, target: Actor) -> str:
    return f"{source[1]} waits for {target[1]}"


class Procs:
    """Some processes, with requests in the states that the test sets."""

    def __init__(self) -> None:
        self.state: dict[PendingRequest, State] = {}
        self.waits: dict[str, WaitGraph] = {}
        self.ports = 0

    def at(self, proc: str) -> WaitGraph:
        return self.waits.setdefault(proc, WaitGraph(proc, self.state.get))

    def begin(self, source: Actor, *targets: Actor, state: State | None = "queued") -> Begun:
        self.ports += 1
        requests = [PendingRequest(source[0], self.ports, *target) for target in targets]
        if state:
            self.state.update(dict.fromkeys(requests, state))
        number = self.at(source[0]).begin(
            source[1], requests, lambda request: hop(source, (request.target, request.actor))
        )
        return number, requests

    def deliver(self, probes: Iterable[Probe]) -> tuple[list[tuple[str, Deadlock]], int]:
        """Deliver the probes and their results; return the deadlocks found, and the number of probes."""
        told: list[tuple[str, Deadlock]] = []
        waiting = list(probes)
        delivered = 0
        while waiting:
            probe = waiting.pop(0)
            delivered += 1
            onward, found = self.at(probe.request.target).receive(probe)
            waiting += onward
            if found:
                told.append((probe.request.target, found))
        return told, delivered


A, B, C = ("p", "a"), ("q", "b"), ("r", "c")


def test_actor_waiting_for_itself_is_deadlock() -> None:
    procs = Procs()
    number, _ = procs.begin(A, A)
    probes, found = procs.at("p").probes(number)
    assert (probes, found) == ([], Deadlock(number, ("a waits for a",)))
    assert found and found.message().startswith("an actor waits for itself")


def test_two_actors_of_one_process_deadlock() -> None:
    procs = Procs()
    other = ("p", "b")
    first, _ = procs.begin(A, other)
    assert procs.at("p").probes(first) == ([], None)
    second, _ = procs.begin(other, A, state="running")
    assert procs.at("p").probes(second) == ([], Deadlock(second, ("b waits for a", "a waits for b")))
    # The reported wait is about to fail, which frees the other.
    assert procs.at("p").probes(first) == ([], None)


def test_two_actors_of_two_processes_deadlock() -> None:
    procs = Procs()
    first, _ = procs.begin(A, B)
    second, _ = procs.begin(B, A, state="running")
    probes, found = procs.at("q").probes(second)
    assert found is None
    assert [probe.request.target for probe in probes] == ["p"]
    told, _ = procs.deliver(probes)
    assert told == [("q", Deadlock(second, ("b waits for a", "a waits for b")))]
    assert procs.deliver(procs.at("p").probes(first)[0])[0] == []


def test_three_actors_of_two_processes_deadlock() -> None:
    procs = Procs()
    second = ("p", "b")
    first, _ = procs.begin(A, second)
    procs.begin(second, C, state="running")
    procs.begin(C, A, state="running")
    probes, found = procs.at("p").probes(first)
    assert (len(probes), found) == (1, None)
    path = ("a waits for b", "b waits for c", "c waits for a")
    told, _ = procs.deliver(probes)
    assert told == [("p", Deadlock(first, path))]
    lines = told[0][1].message().splitlines()
    assert lines[0].startswith("3 actors wait for each other")
    assert lines[1:4] == ["  " + text for text in path]


def test_one_of_eight_callees_waits_back() -> None:
    procs = Procs()
    ranks = [(f"rank{rank}", f"w{rank}") for rank in range(8)]
    number, requests = procs.begin(A, *ranks, state="running")
    procs.begin(ranks[5], A)
    # The others are answered or running.
    for request in requests[:3]:
        del procs.state[request]
        procs.at("p").answered(number, request)
    probes, _ = procs.at("p").probes(number)
    assert len(probes) == 5
    told, delivered = procs.deliver(probes)
    assert told == [("p", Deadlock(number, ("a waits for w5", "w5 waits for a")))]
    assert delivered == 6


@pytest.mark.parametrize("source", [A, B])
def test_actor_that_is_not_blocked_may_answer(source: Actor) -> None:
    procs = Procs()
    number, _ = procs.begin(source, C)
    assert procs.deliver(procs.at(source[0]).probes(number)[0]) == ([], 1)


def test_any_actor_may_answer_through_explicit_port() -> None:
    procs = Procs()
    first, _ = procs.begin(A, B, state="explicit")
    second, _ = procs.begin(B, A, state="running")
    assert procs.deliver(procs.at("p").probes(first)[0])[0] == []
    assert procs.deliver(procs.at("q").probes(second)[0])[0] == []
    # The initiator itself may be the one with the port.
    itself, _ = procs.begin(C, C, state="explicit")
    assert procs.at("r").probes(itself) == ([], None)


def test_request_queued_behind_explicit_port_waits() -> None:
    procs = Procs()
    procs.begin(("client", "-"), B, state="explicit")
    first, _ = procs.begin(A, B, state="queued")
    procs.begin(B, A, state="running")
    assert len(procs.deliver(procs.at("p").probes(first)[0])[0]) == 1


def test_probe_of_ended_wait_is_ignored() -> None:
    procs = Procs()
    first, requests = procs.begin(A, B)
    procs.begin(B, A, state="running")
    probes, _ = procs.at("p").probes(first)
    (back,), _ = procs.at("q").receive(probes[0])
    procs.at("p").end(first)
    assert procs.at("p").receive(back) == ([], None)
    assert procs.at("p").probes(first) == ([], None)
    procs.at("p").end(first)
    procs.at("p").answered(first, requests[0])
    # Not even by the next wait of the same actor.
    again, _ = procs.begin(A, C)
    assert again > first
    assert procs.at("p").receive(back) == ([], None)


def test_answered_request_is_not_followed() -> None:
    procs = Procs()
    first, _ = procs.begin(A, B, state=None)
    second, requests = procs.begin(B, A)
    assert procs.deliver(procs.at("p").probes(first)[0])[0] == []
    procs.at("q").answered(second, requests[0])
    assert procs.at("q").probes(second) == ([], None)


def test_later_round_finds_new_deadlock() -> None:
    procs = Procs()
    first, _ = procs.begin(A, B)
    procs.begin(B, C)
    assert procs.deliver(procs.at("p").probes(first)[0])[0] == []
    procs.begin(C, A)
    told, _ = procs.deliver(procs.at("p").probes(first)[0])
    assert [found.wait for _, found in told] == [first]


def test_probe_does_not_loop_without_its_initiator() -> None:
    procs = Procs()
    first, _ = procs.begin(A, B)
    procs.begin(B, C)
    procs.begin(C, B)
    assert procs.deliver(procs.at("p").probes(first)[0]) == ([], 3)


def test_ask_makes_one_probe_for_each_request() -> None:
    procs = Procs()
    ranks = [(f"rank{rank}", f"w{rank}") for rank in range(8)]
    waits = [procs.begin(rank, *(other for other in ranks if other != rank))[0] for rank in ranks]
    told, delivered = procs.deliver(procs.at("rank3").probes(waits[3])[0])
    assert {found.wait for _, found in told} == {waits[3]}
    assert delivered <= 8 * 7


def test_actor_has_one_wait_at_time() -> None:
    procs = Procs()
    procs.begin(A, B)
    with pytest.raises(ValueError, match="'a' is already waiting"):
        procs.begin(A, C)


def test_memory_of_probes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch._core.deadlock._REMEMBERED", 10)
    procs = Procs()
    _, requests = procs.begin(A, B)
    procs.state[requests[0]] = "queued"
    procs.begin(B, C)
    for number in range(100):
        assert procs.at("q").receive(Probe("p", str(number), 1, 1, requests[0], ("",)))[0]
    last = Probe("p", "99", 1, 1, requests[0], ("",))
    assert procs.at("q").receive(last) == ([], None)
    assert len(procs.at("q")._by_actor["b"].seen) == 10


def test_probe_survives_the_wire() -> None:
    procs = Procs()
    number, _ = procs.begin(A, B)
    (probe,), _ = procs.at("p").probes(number)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(probe), type=Probe) == probe


class Handling(NamedTuple):
    """A request, and what its endpoint will do."""

    request: PendingRequest
    calls: list[list[Actor]]
    """The actors that it calls and waits for, one group after the other."""
    explicit: bool


class Blocked(NamedTuple):
    number: int
    requests: set[PendingRequest]


class World:
    """Processes with actors that call each other; any step may take any time.

    Args:
        choices: the events and their order; zeros when they run out.
        fails: whether a reported wait fails, so that its actor continues; otherwise it stays blocked.
    """

    def __init__(self, procs: int, actors: int, choices: list[int], fails: bool) -> None:
        self.actors: list[Actor] = [(f"p{index % procs}", f"a{index}") for index in range(actors)]
        self.choices = iter(choices)
        self.fails = fails
        self.waits = {proc: WaitGraph(proc, self.state) for proc, _ in self.actors}
        self.queue: dict[Actor, list[Handling]] = defaultdict(list)
        self.running: dict[Actor, Handling] = {}
        self.blocked: dict[Actor, Blocked] = {}
        # Explicit ones that began and have no reply; it may come while they run, or later.
        self.ports: list[PendingRequest] = []
        self.told: set[Actor] = set()
        # In flight; any of them may be the next to arrive.
        self.calls: list[Handling] = []
        self.replies: list[PendingRequest] = []
        self.probes: list[Probe] = []
        self.sent = 0
        self.made = 0

    def choose(self, below: int) -> int:
        return next(self.choices, 0) % below

    def state(self, request: PendingRequest) -> State | None:
        actor = (request.target, request.actor)
        now = self.running.get(actor)
        if now and now.request == request:
            return "explicit" if now.explicit else "running"
        return "queued" if any(each.request == request for each in self.queue[actor]) else None

    def call(self, proc: str, target: Actor, depth: int) -> PendingRequest:
        self.made += 1
        request = PendingRequest(proc, self.made, *target)
        calls = [
            [self.actors[self.choose(len(self.actors))] for _ in range(1 + self.choose(3))]
            for _ in range(self.choose(3) if depth else 0)
        ]
        self.calls.append(Handling(request, calls, self.choose(8) == 7))
        return request

    def edges(self) -> dict[Actor, set[Actor]]:
        """Return who is blocked by whom: by requests that have arrived and that only their target can answer."""
        return {
            actor: {
                (request.target, request.actor)
                for request in wait.requests
                if self.state(request) in ("queued", "running")
            }
            for actor, wait in self.blocked.items()
        }

    def on_cycle(self, without: Iterable[Actor] = ()) -> set[Actor]:
        """Return the members of deadlocks."""
        edges = {actor: targets for actor, targets in self.edges().items() if actor not in set(without)}

        def reached(start: Actor) -> set[Actor]:
            found: set[Actor] = set()
            todo = [start]
            while todo:
                new = edges.get(todo.pop(), set()) & edges.keys() - found
                found |= new
                todo += new
            return found

        return {actor for actor in edges if actor in reached(actor)}

    def step(self, actor: Actor) -> None:
        """Perform a step of an actor: take a request, make its next calls and wait, or finish."""
        now = self.running.get(actor)
        if now is None:
            now = self.running[actor] = self.queue[actor].pop(0)
            if now.explicit:
                self.ports.append(now.request)
        elif now.calls:
            # Fewer and fewer calls, so that it ends.
            depth = int(self.made < 40)
            requests = {self.call(actor[0], target, depth) for target in now.calls.pop(0)}
            number = self.waits[actor[0]].begin(
                actor[1], requests, lambda request: hop(actor, (request.target, request.actor))
            )
            self.blocked[actor] = Blocked(number, requests)
        else:
            del self.running[actor]
            if not now.explicit:
                self.replies.append(now.request)

    def replied(self, request: PendingRequest) -> None:
        for actor, wait in list(self.blocked.items()):
            if request in wait.requests:
                wait.requests.discard(request)
                self.waits[actor[0]].answered(wait.number, request)
                if not wait.requests:
                    self.go_on(actor)

    def go_on(self, actor: Actor) -> None:
        self.waits[actor[0]].end(self.blocked.pop(actor).number)

    def ask(self, actor: Actor) -> None:
        self.took(actor[0], self.waits[actor[0]].probes(self.blocked[actor].number))

    def took(self, proc: str, result: tuple[list[Probe], Deadlock | None]) -> None:
        probes, found = result
        assert all(probe.request.target != proc for probe in probes)
        self.probes += probes
        self.sent += len(probes)
        if found is None:
            return
        assert not probes
        (actor,) = (
            actor
            for actor, wait in self.blocked.items()
            if actor[0] == proc and wait.number == found.wait and actor not in self.told
        )
        if self.fails:
            self.running[actor].calls.clear()
            self.go_on(actor)
            return
        assert actor in self.on_cycle()
        # The path is a cycle of the graph, from this actor back to it.
        edges = {hop(*pair): pair for pair in self.pairs()}
        path = [edges[text] for text in found.path]
        assert path[0][0] == path[-1][1] == actor
        assert all(before[1] == after[0] for before, after in pairwise(path))
        self.told.add(actor)

    def pairs(self) -> list[tuple[Actor, Actor]]:
        return [(actor, target) for actor, targets in self.edges().items() for target in targets]

    def arrive(self, call: Handling) -> None:
        self.queue[call.request.target, call.request.actor].append(call)

    def receive(self, probe: Probe) -> None:
        self.took(probe.request.target, self.waits[probe.request.target].receive(probe))

    def enabled(self, asking: bool) -> list[Callable[[], None]]:
        """Return the events that are possible next."""

        def of(events: list[object], do: Callable[..., None]) -> list[Callable[[], None]]:
            def take(event: object) -> None:
                events.remove(event)
                do(event)

            return [lambda event=event: take(event) for event in events]

        able = [
            lambda actor=actor: self.step(actor)
            for actor in self.actors
            if actor not in self.blocked and (actor in self.running or self.queue[actor])
        ]
        asks = [lambda actor=actor: self.ask(actor) for actor in self.blocked if actor not in self.told]
        return [
            *of(self.calls, self.arrive),  # type: ignore[arg-type]
            *able,
            *of(self.replies, self.replied),  # type: ignore[arg-type]
            *of(self.probes, self.receive),  # type: ignore[arg-type]
            *(of(self.ports, self.replies.append) if asking else []),  # type: ignore[arg-type]
            *(asks if asking else []),
        ]

    def settle(self) -> None:
        """Let all automatic steps happen."""
        while events := self.enabled(asking=False):
            events[self.choose(len(events))]()

    def run(self, clients: int, steps: int) -> None:
        for _ in range(clients):
            self.call("client", self.actors[self.choose(len(self.actors))], 1)
        for _ in range(steps):
            events = self.enabled(asking=True)
            if not events:
                break
            events[self.choose(len(events))]()
        self.settle()


WORLDS = {
    "procs": st.integers(1, 3),
    "actors": st.integers(1, 6),
    "choices": st.lists(st.integers(0, 2**16), min_size=30, max_size=250),
    "clients": st.integers(1, 5),
}


@settings(max_examples=250, deadline=None)
@given(**WORLDS)
def test_exactly_the_deadlocks_are_reported(procs: int, actors: int, choices: list[int], clients: int) -> None:
    world = World(procs, actors, choices, fails=False)
    world.run(clients, steps=len(choices))
    for actor in world.actors:
        if actor in world.blocked and actor not in world.told:
            before = world.sent
            world.ask(actor)
            world.settle()
            most = sum(len(wait.requests) for wait in world.blocked.values())
            assert world.sent - before <= most
    assert not world.on_cycle(without=world.told)
    assert world.told <= world.on_cycle()


@settings(max_examples=150, deadline=None)
@given(**WORLDS)
def test_others_continue_when_deadlocked_waits_fail(procs: int, actors: int, choices: list[int], clients: int) -> None:
    world = World(procs, actors, choices, fails=True)
    world.run(clients, steps=len(choices))
    while world.blocked:
        waiting = {(proc, wait.number) for (proc, _), wait in world.blocked.items()}
        for actor in world.actors:
            if actor in world.blocked:
                world.ask(actor)
                world.settle()
        if {(proc, wait.number) for (proc, _), wait in world.blocked.items()} == waiting and not world.ports:
            pytest.fail(f"{sorted(world.blocked)} wait for ever")
        world.replies += world.ports
        world.ports.clear()
        world.settle()
