"""Output, reports and answers reach the program by way of other agents: each once, in order, also if those die."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._node.spreads.spreads import Spreads
from monarch._procs.agent.merging import OutputMerge, outputs_of
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.session_folder import host_of
from monarch._session.routes.uplinks import Uplinks
from monarch._wire import messages as m

PROGRAM = "c/c1"

DEATHS = """
import os, signal, time
from pathlib import Path
import psutil
from monarch._core.telemetry.events import Metrics
from monarch._node.current import current_node
from monarch._session.session import session_of
from monarch._telemetry.collector import telemetry_of
from monarch.actor import Actor, endpoint
from monarch.telemetry import log_metric
from monarch.testing import local_hosts

class Rank(Actor):
    @endpoint
    def pids(self):
        process = psutil.Process()
        while process.name() != "monarch-agent":
            process = process.parent()
        return os.getpid(), process.pid

    @endpoint
    def talk(self, path):
        count = 0
        while not os.path.exists(path):
            print("line", count)
            print("rank", os.getpid(), "line", count)
            log_metric("count", count, count)
            count += 1
            time.sleep(0.002)
        Path(f"part {os.getpid()}").write_text(str(count))
        os.rename(f"part {os.getpid()}", f"told {os.getpid()}")

def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.01)

if __name__ == "__main__":
    with local_hosts(9) as hosts:
        session = session_of(current_node())
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        pids = list(ranks.pids.call().get(60).values())
        vias = lambda: [via for gateway, via in session._uplinks._routes.values() if not gateway.closed.is_set()]
        until(lambda: len(vias()) == 9)
        lines, merged = {}, []
        left = (2, 4, 5, 6, 7, 8)
        def shown(line):
            for rank in line.ranks:
                lines.setdefault(rank, []).append(line.text)
            merged.append(len(line.ranks))
        session.output.on_line = shown
        ranks.talk.broadcast("stop")
        count = lambda: min(len(lines.get(rank, ())) for rank in left)
        until(lambda: count() > 50)
        # The agents that merge: of the first share twice, with others between, and of the second.
        for deaths, dying in enumerate((0, 3, 1), 1):
            at = count()
            os.kill(pids[dying][1], signal.SIGKILL)
            until(lambda: len(vias()) == 9 - deaths)
            until(lambda: count() > at + 50)
        open("stop", "w").close()
        files = {rank: Path(f"told {pids[rank][0]}") for rank in left}
        until(lambda: all(file.exists() for file in files.values()))
        told = {rank: int(file.read_text()) for rank, file in files.items()}
        until(lambda: all(len(lines[rank]) >= 2 * count for rank, count in told.items()))
        for rank, count in told.items():
            pid = pids[rank][0]
            expected = [text for n in range(count) for text in (f"line {n}", f"rank {pid} line {n}")]
            print(rank, count > 90, lines[rank] == expected)
        print("merged", max(merged) > 5)
        def logged():
            steps = {rank: [] for rank in told}
            for entry in telemetry_of(ranks).events():
                if isinstance(entry.event, Metrics) and entry.event.rank in steps:
                    steps[entry.event.rank] += entry.event.steps
            return steps
        # Values that were logged just before the end come a moment later.
        until(lambda: all(len(steps) >= told[rank] for rank, steps in logged().items()))
        print([logged()[rank] == list(range(count)) for rank, count in told.items()])
"""


def test_death_of_merging_hosts_loses_no_line_and_no_metric(program: Callable[..., Any]) -> None:
    done = program(DEATHS, MONARCH_TREE_HOSTS="3", timeout=120)
    expected = [*(f"{rank} True True" for rank in (2, 4, 5, 6, 7, 8)), "merged True", str([True] * 6)]
    assert done.out.splitlines() == expected, done.err


PRINTED = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([b"same\n", b"other\n", b"x"]), st.sampled_from(["stdout", "stderr"])),
    max_size=60,
)


@given(PRINTED, st.integers(1, 8))
def test_merged_output_loses_nothing_and_keeps_the_order(printed: list[tuple[int, bytes, str]], often: int) -> None:
    merge, merged = OutputMerge(), list[m.MergedOutput]()
    offsets: dict[tuple[str, str], int] = {}
    before: dict[str, list[m.Output]] = {}
    for number, (rank, data, stream) in enumerate(printed):
        proc = f"h{rank}/m.{rank}"
        offset = offsets.get((proc, stream), 0)
        offsets[proc, stream] = offset + len(data)
        output = m.Output(proc, "actor", "method", PROGRAM, number // 20, [(stream, offset, data)])
        before.setdefault(proc, []).append(output)
        merge.add(output)
        if number % often == 0:
            merged += merge.take()
    merged += merge.take()
    after: dict[str, list[m.Output]] = {}
    for group in merged:
        for output in outputs_of(group):
            after.setdefault(output.src, []).append(output)
    assert after == before


def test_equal_lines_of_many_ranks_leave_as_one_text() -> None:
    merge = OutputMerge()
    for rank in range(100):
        merge.add(m.Output(f"h{rank}/m.{rank}", "a", "f", PROGRAM, 1, [("stdout", 0, b"epoch 1\n")]))
        merge.add(m.Output(f"h{rank}/m.{rank}", "a", "f", PROGRAM, 1, [("stdout", 8, b"epoch 2\n")]))
    first, second = merge.take()
    assert first.pieces == [("stdout", b"epoch 1\n")] and second.pieces == [("stdout", b"epoch 2\n")]
    assert [(offsets, len(procs)) for offsets, procs in first.members + second.members] == [([0], 100), ([8], 100)]


class Wires:
    """Agents and a program, and all messages between them that have not arrived."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.wires: dict[tuple[str, str], deque[list[Any]]] = {}
        self.timers: list[Callable[[], None]] = []
        names = [f"h{place}/agent" for place in range(count)]
        self.agents = {name: AgentUplink(self._router(name), partial(self._later_of, name)) for name in names}
        self.gateways: list[Any] = [self._gateway(name) for name in names]
        spreads = self.spreads = Spreads(PROGRAM, {each.host: each for each in self.gateways})
        self.join(count)
        self.handlers: dict[type, Any] = {}
        hosts = SimpleNamespace(
            spreads=spreads,
            gateways={each.host: each for each in self.gateways},
            out_of_reach=lambda host: None,
        )
        node: Any = SimpleNamespace(
            proc=PROGRAM,
            closed=False,
            hosts=hosts,
            dispatch=SimpleNamespace(handle=self.handlers.__setitem__, take=self._take),
            receive_loop=SimpleNamespace(call_later=self.later, post=lambda action: action()),
        )
        output: Any = SimpleNamespace(take_merged=lambda merged: [self._take(each) for each in outputs_of(merged)])
        self.uplinks = Uplinks(node, output, lambda host: None, lambda host: None)
        # None of them relays another.
        spreads.least = 100
        self.shown: dict[str, bytes] = {}
        self.noted: dict[str, list[int]] = {}
        self.printed: dict[str, bytes] = {}
        self.told: dict[str, int] = {}

    def _router(self, proc: str) -> Any:
        router = SimpleNamespace(
            proc=proc, lease=60.0, overtaking=lambda dst: None, knows=lambda dst: dst in self.agents
        )

        def post(dst: str, frames: list[Any]) -> bool:
            if proc in self.agents:
                self.wires.setdefault((proc, dst), deque()).append(frames)
            return True

        def send(dst: str, frames: list[Any]) -> bool:
            router.overtaking(dst)
            return post(dst, frames)

        router.post, router.send, router.connect = post, send, lambda host: None
        return router

    def _gateway(self, agent: str) -> Any:
        def send(frame: bytes, more: Any = ()) -> None:
            self.wires.setdefault((PROGRAM, agent), deque()).append([*more[:1]] if more else [frame])

        return SimpleNamespace(
            host=host_of(agent), link=SimpleNamespace(send=send), closed=Event(), spreads=None, group=0, last=0,
            arrived=1, settled=0.0, due=0, relay="", heard=[], keeps=False, kept=deque(), parent=None, spare=None,
        )  # fmt: skip

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.timers.append(action)

    def _later_of(self, agent: str, seconds: float, action: Callable[[], None]) -> None:
        self.later(seconds, lambda: action() if agent in self.agents else None)

    def _take(self, message: Any, more: Any = ()) -> None:
        if isinstance(message, m.Output):
            ((_, offset, data),) = message.pieces
            shown = self.shown.get(message.src, b"")
            assert offset <= len(shown), f"{message.src} lost what precedes {data!r}"
            self.shown[message.src] = shown + data[len(shown) - offset :]
        elif isinstance(message, m.Reports):
            self.noted.setdefault(message.src, []).append(int(message.now))
        elif isinstance(message, m.Reply):
            # What was printed before an answer was sent has arrived before it.
            assert len(self.shown.get(message.src, b"")) >= message.done

    # Steps

    def print(self, agent: str) -> None:
        proc = f"{host_of(agent)}/m.0"
        printed = self.printed.get(proc, b"")
        data = self.random.choice([b"same\n", b"%d\n" % len(printed)])
        self.printed[proc] = printed + data
        self.send(agent, m.Output(proc, "a", "f", PROGRAM, 1, [("stdout", len(printed), data)]))

    def report(self, agent: str) -> None:
        self.told[agent] = self.told.get(agent, 0) + 1
        self.send(agent, m.Reports(agent, self.told[agent], []))

    def answer(self, agent: str) -> None:
        proc = f"{host_of(agent)}/m.0"
        router: Any = self.agents[agent]._router
        router.send(PROGRAM, [m.encode(m.Reply(proc, 1, 0, m.RESULT, len(self.printed.get(proc, b"")), b""))])

    def send(self, agent: str, message: Any) -> None:
        uplink = self.agents[agent]
        if not uplink.add(PROGRAM, m.encode(message)):
            uplink._router.send(PROGRAM, [m.encode(message)])

    def deliver(self) -> bool:
        """Let the oldest message of some connection arrive."""
        full = sorted(wire for wire, waiting in self.wires.items() if waiting)
        if not full:
            return False
        src, dst = self.random.choice(full)
        message: Any = m.decode(self.wires[src, dst].popleft()[0])
        if dst == PROGRAM:
            handler = self.handlers.get(type(message))
            handler(message, []) if handler else self._take(message)
        elif dst in self.agents:
            uplink = self.agents[dst]
            {
                m.Uplink: lambda: uplink.on_uplink(message),
                m.Upward: lambda: uplink.on_upward(message, []),
                m.Taken: lambda: uplink.on_taken(message, []),
            }[type(message)]()
        return True

    def run_timer(self) -> bool:
        if self.timers:
            self.timers.pop(self.random.randrange(len(self.timers)))()
            return True
        return False

    def kill(self, agent: str) -> None:
        """End an agent: some of its last messages are lost; the others learn of it one by one."""
        del self.agents[agent]
        for (src, _), waiting in self.wires.items():
            for _ in range(self.random.randrange(len(waiting) + 1) if src == agent else 0):
                waiting.pop()
        gateway = next(each for each in self.gateways if each.host == host_of(agent))

        def lose() -> None:
            gateway.closed.set()
            self.uplinks.arrange()

        self.later(0, lose)
        for uplink in self.agents.values():
            self.later(0, partial(uplink.lost, host_of(agent)))

    def part(self) -> None:
        """Break the connection from one agent to another; both go on."""
        wires = sorted(wire for wire in self.wires if wire[0] in self.agents and wire[1] in self.agents)
        if wires:
            src, dst = self.random.choice(wires)
            waiting = self.wires[src, dst]
            for _ in range(self.random.randrange(len(waiting) + 1)):
                waiting.pop()
            self.agents[src].lost(host_of(dst))

    def join(self, count: int) -> None:
        """Divide the first hosts into shares."""
        self.spreads.group(self.gateways[:count])
        for each in self.gateways[:count]:
            each.settled = 0.0

    def settle(self) -> None:
        """Let everything arrive."""
        for _ in range(10_000):
            if not (self.deliver() or self.run_timer()):
                return
        raise AssertionError("the agents do not come to rest")


@settings(max_examples=800)
@given(st.integers(0, 2**32), st.integers(4, 7), st.integers(0, 3), st.integers(60, 200))
def test_deaths_on_the_way_lose_nothing(seed: int, count: int, deaths: int, steps: int) -> None:
    wires = Wires(count, seed)
    choose = wires.random
    dying = sorted(choose.sample(range(steps + 1), min(deaths, steps + 1)))
    begin, later = sorted(choose.choices(range(steps + 1), k=2))
    wires.join(choose.randrange(2, count + 1))
    for step in range(steps):
        if step == begin:
            wires.uplinks.arrange()
        if step == later:
            # Other hosts join, and the shares change.
            wires.join(count)
            wires.uplinks.arrange()
        if dying and step >= dying[0]:
            dying.pop(0)
            wires.kill(choose.choice(sorted(wires.agents)))
        agent = choose.choice(sorted(wires.agents))
        action = choose.choice([wires.print, wires.print, wires.report, wires.answer, None, None, None])
        if choose.random() < 0.02:
            wires.part()
        if action is not None:
            action(agent)
        elif not (choose.random() < 0.8 and wires.deliver()):
            wires.run_timer()
    wires.settle()
    for agent in wires.agents:
        proc = f"{host_of(agent)}/m.0"
        assert wires.shown.get(proc, b"") == wires.printed.get(proc, b"")
        assert wires.noted.get(agent, []) == list(range(1, wires.told.get(agent, 0) + 1))
        assert not wires.agents[agent]._kept
        assert not wires.agents[agent]._merging._sent


def test_agents_without_a_way_send_as_before() -> None:
    wires = Wires(3, 0)
    wires.print("h0/agent")
    (sent,) = wires.wires["h0/agent", PROGRAM]
    assert isinstance(m.decode(sent[0]), m.Output)


def test_host_that_does_not_reach_another_sends_straight() -> None:
    wires = Wires(3, 0)
    wires.uplinks.arrange()
    wires.settle()
    sender = "h1/agent"
    router: Any = wires.agents[sender]._router
    router.lease = 0.0
    wires.print(sender)
    # It waits for a connection that never comes.
    assert wires.wires.pop((sender, "h0/agent"))
    wires.settle()
    assert wires.shown == wires.printed and not wires.agents[sender]._kept


@pytest.mark.parametrize("count", [4, 9, 30])
def test_program_gets_one_message_from_each_group(count: int) -> None:
    wires = Wires(count, 1)
    wires.uplinks.arrange()
    wires.settle()
    for agent in wires.agents:
        wires.print(agent)
    sources: list[str] = []
    take = wires.handlers[m.Merged]
    wires.handlers[m.Merged] = lambda merged, more: (sources.append(merged.src), take(merged, more))
    # First what the agents send to one another, then the timers of those that merge.
    while any(waiting and dst != PROGRAM for (_, dst), waiting in wires.wires.items()):
        wires.deliver()
    wires.settle()
    assert len(sources) == len(set(sources)) == len({each.group for each in wires.gateways if each.group >= 0})
    assert sum(map(len, wires.shown.values())) == sum(map(len, wires.printed.values()))
