"""Refusals of host agents: what they cost, what is left of them, and whose connections count as the owner's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from leaks import wait_until
from monarch._procs.agent.poll_loop import PollLoop
from monarch._procs.agent.routes.refusing import Refusing
from monarch._procs.agent.routes.router import Router
from monarch._procs.session_folder import ipc_address
from monarch._session.workers import read_key_file
from monarch._wire import messages as m
from monarch._wire.handshake import Handshake, HandshakeProbe
from monarch._wire.keys import CurveAuthenticator, KeyPair
from monarch._wire.links import Inbox, Link, make_context
from workers import Workers

SOON = 20.0
"""Seconds until something has happened, on a busy machine."""
LEASE = 0.2


class Refuser:
    """The router and the refusals of an agent, in the loop of one, and the inbox of the programs that it refuses."""

    def __init__(self, folder: Path, lease: float) -> None:
        self.context = make_context()
        self.folder = str(folder)
        self.keys = KeyPair.new()
        self.router = Router(self.context, "h/agent", self.folder, self.keys, lease)
        self.loop = PollLoop()
        self.refusing = Refusing(self.router, self.loop.later)
        self.programs = Programs(self.context, self.keys)

    def ask(self, proc: str, token: str = "t") -> None:
        self.refusing.answer(m.Hosts({proc: self.programs.where}, token), "")

    def step(self) -> None:
        """Step as an agent does."""
        for monitor in self.router.idle():
            if self.loop.watches(monitor):
                self.loop.unwatch(monitor)
            monitor.close(0)
        for monitor in self.router.monitors():
            if not self.loop.watches(monitor):
                self.loop.watch(monitor, lambda monitor=monitor: self._lost(monitor))
        self.loop.later(0.01, lambda: None)
        self.loop.step()

    def say(self) -> None:
        """Let the refusals be sent."""
        while self.refusing._asked:
            self.loop.step()

    def _lost(self, monitor: zmq.Socket[bytes]) -> None:
        self.loop.unwatch(monitor)
        self.router.forget_address(self.router.lost(monitor))

    def close(self) -> None:
        self.router.close()
        self.programs.close()
        self.context.destroy(0)


class Programs:
    """The one inbox of several programs."""

    def __init__(self, context: zmq.Context[Any], keys: KeyPair) -> None:
        self.door = CurveAuthenticator(context)
        self.door.allow("controller", [keys.public])
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.where = (self.door.bind(self.socket, "tcp://127.0.0.1", keys, "controller", 5.0), keys.public.decode())

    def hear(self) -> Any:
        """Return the next message that is no Hello."""
        while True:
            assert self.socket.poll(int(SOON * 1000))
            message = m.decode(self.socket.recv())
            if not isinstance(message, m.Hello):
                return message

    def close(self) -> None:
        self.socket.close(0)
        self.door.close()


@pytest.fixture
def refuser(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Refuser]:
    made = Refuser(tmp_path, getattr(request, "param", LEASE))
    yield made
    made.close()


def test_refused_programs_share_two_timers(refuser: Refuser) -> None:
    for number in range(200):
        refuser.ask(f"p{number % 50}/c", str(number))
    assert len(refuser.loop._timers) == 2
    # Each question has its own answer.
    refuser.say()
    tokens = [refuser.programs.hear().token for _ in range(200)]
    assert sorted(tokens, key=int) == [str(number) for number in range(200)]


class Clock:
    """The time of the refusals."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(f"{Refusing.__module__}.time", made)
    return made


# A lease that does not end in the time of the test's clock.
@pytest.mark.parametrize("refuser", [60.0], indirect=True)
def test_flood_of_programs_takes_few_connections(clock: Clock, refuser: Refuser) -> None:
    for number in range(1000):
        refuser.ask(f"p{number}/c")
    refuser.say()
    few = refuser.router.monitors()
    assert 10 <= len(few) <= 100
    clock.now += 0.9
    refuser.ask("p0/c")
    refuser.say()
    refuser.ask("late/c", "late")
    assert refuser.router.monitors() == few
    # Those that have their answer make room, one for another.
    clock.now += 0.2
    refuser.ask("late/c", "later")
    refuser.say()
    assert len(refuser.router.monitors()) == len(few) and refuser.router.monitors()[0] is few[0]
    tokens = [refuser.programs.hear().token for _ in range(len(few) + 2)]
    assert tokens.count("later") == 1 and "late" not in tokens


def test_flood_of_questions_has_few_answers(refuser: Refuser) -> None:
    """The newest are answered: an earlier version of the program asks again as soon as it has its answer."""
    for number in range(2000):
        refuser.ask("p/c", str(number))
    refuser.say()
    tokens = [refuser.programs.hear().token for _ in range(8)]
    assert tokens == [str(number) for number in range(1992, 2000)]
    refuser.ask("p/c", "last")
    refuser.say()
    assert refuser.programs.hear().token == "last"


def test_refused_programs_that_live_leave_nothing(refuser: Refuser) -> None:
    for number in range(10):
        refuser.ask(f"p{number}/c")
    refuser.say()
    monitors = refuser.router.monitors()
    assert len(monitors) == 10

    def parted() -> bool:
        refuser.step()
        return all(monitor.closed for monitor in monitors)

    assert wait_until(parted, SOON)
    assert not refuser.router.monitors() and not any(refuser.loop.watches(monitor) for monitor in monitors)
    assert not any(refuser.router.address_of(f"p{number}/c").hosts for number in range(10))
    assert not refuser.refusing.told("p0/c")


def test_dropped_connection_is_no_loss_later(refuser: Refuser) -> None:
    """Such as that to a host that is not reached: its end is not told, and another one is made without hurry."""
    refuser.router.learn(m.Hosts({"x": refuser.programs.where}))
    refuser.router.connect("x")
    (monitor,) = refuser.router.monitors()
    refuser.step()
    refuser.programs.socket.close(0)

    def lost() -> bool:
        refuser.step()
        return not refuser.router.monitors()

    assert wait_until(lost, SOON)
    assert monitor.closed and not refuser.router._broken


def test_program_of_another_version_is_refused_after_many_others(refuser: Refuser) -> None:
    """Those that never ask are forgotten: the oldest when there are too many, and all after a while."""
    for number in range(1500):
        refuser.refusing.greeted(m.Hello(m.VERSION + 1, f"p{number}/c", 1))
    inbox = Inbox(refuser.context, ipc_address(refuser.folder, "h/new"))
    try:
        refuser.refusing.greeted(m.Hello(m.VERSION + 2, "h/new", 1))
        refuser.ask("p1499/c")
        refuser.say()
        assert f"this program speaks {m.VERSION + 1};" in refuser.programs.hear().reason
        assert inbox.socket.poll(int(SOON * 1000)) and isinstance(m.decode(inbox.socket.recv()), m.Hello)
        assert inbox.socket.poll(int(SOON * 1000))
        refused = m.decode(inbox.socket.recv())
        assert isinstance(refused, m.Refused) and f"this program speaks {m.VERSION + 2};" in refused.reason
    finally:
        inbox.close()
    assert refuser.refusing.is_other(m.Hosts({"p1498/c": ("", "")}))
    assert not refuser.refusing.is_other(m.Hosts({"p0/c": ("", "")}))

    def forgotten() -> bool:
        refuser.step()
        return not refuser.refusing.is_other(m.Hosts({"p1498/c": ("", "")}))

    assert wait_until(forgotten, SOON)


def test_refused_program_does_not_take_the_place_of_a_host(refuser: Refuser) -> None:
    refuser.router.learn(m.Hosts({"h2": ("tcp://127.0.0.1:1", refuser.keys.public.decode())}))
    refuser.ask("h2")
    assert refuser.router.address_of("h2").hosts["h2"][0] == "tcp://127.0.0.1:1"
    assert not refuser.router.monitors() and not refuser.refusing.told("h2")


# Workers


@pytest.fixture
def workers(warm: None, leaks: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


class Controller:
    """The connection of a program to a worker."""

    def __init__(self, address: str, keys: KeyPair, proc: str) -> None:
        self.context = make_context()
        self.proc = proc
        self.link = Link(self.context, address, m.encode(m.Hello(m.VERSION, proc, os.getpid())), keys, keys.public)

    def ask(self, where: tuple[str, str]) -> None:
        self.link.send(m.encode(m.Hosts({self.proc: where}, self.proc)))

    def close(self) -> None:
        """End it, after what was sent."""
        self.link.close(10_000)
        self.context.term()


@pytest.mark.slow
def test_worker_is_free_after_a_program_that_said_hello_only(workers: Workers) -> None:
    """A connection that nobody uses is still there: that of a program before, which ZeroMQ has made again."""
    process, address = workers.start()
    workers.wait(process)
    keys = read_key_file(workers.key)
    (agent,) = workers.agents()
    with (
        make_context() as context,
        contextlib.closing(HandshakeProbe(context, address, keys, keys.public, 5.0)) as idle,
    ):
        assert wait_until(lambda: idle.look() is Handshake.DONE, SOON)
        Controller(address, keys, "b/c").close()
        assert wait_until(lambda: workers.agents() not in ([], [agent]), SOON)
        assert "waits" in workers.wait(process)


@pytest.mark.slow
def test_worker_keeps_its_program_while_one_connection_lasts(workers: Workers) -> None:
    """Two threads of a program may attach the same worker, and one connection is used."""
    process, address = workers.start()
    workers.wait(process)
    keys = read_key_file(workers.key)
    context = make_context()
    programs = Programs(context, keys)
    first = Controller(address, keys, "b/c")
    first.ask(programs.where)
    known = programs.hear()
    second = Controller(address, keys, "b/c")
    second.ask(programs.where)
    assert programs.hear() == known
    first.close()
    other = Controller(address, keys, "c/c")
    # Its refusal comes after the end of the first connection, at the latest when it asks again.
    for _ in range(3):
        other.ask(programs.where)
        assert isinstance(programs.hear(), m.Refused)
    second.ask(programs.where)
    assert programs.hear() == known
    for each in (second, other):
        each.close()
    assert "waits" in workers.wait(process)
    programs.close()
    context.destroy(0)


@pytest.mark.slow
def test_agent_keeps_no_socket_of_refused_programs(workers: Workers) -> None:
    process, address = workers.start("", "--silence", "0.5")
    workers.wait(process)
    keys = read_key_file(workers.key)
    context = make_context()
    programs = Programs(context, keys)
    owner = Controller(address, keys, "b/c")
    owner.ask(programs.where)
    assert isinstance(programs.hear(), m.Listening)
    (agent,) = workers.agents()

    def files() -> int:
        return len(os.listdir(f"/proc/{agent}/fd"))

    other, before = Controller(address, keys, "other/c"), files()
    for number in range(10):
        other.proc = f"p{number}/c"
        other.ask(programs.where)
        assert isinstance(programs.hear(), m.Refused)
    # A connection to each of them, and what tells its end.
    assert files() >= before + 20
    assert wait_until(lambda: files() < before + 5, SOON)
    for each in (other, owner):
        each.close()
    assert "waits" in workers.wait(process)
    programs.close()
    context.destroy(0)
