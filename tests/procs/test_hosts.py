"""Several hosts: real agents over tcp and CURVE, on this machine and in network namespaces."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from leaks import processes, wait_until
from monarch._core.shapes.ranks import parse_ranks
from monarch._node.current import current_node
from monarch._node.peers.gateway import Gateway
from monarch._session.session import need_session
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.tcp import over_network
from monarch.actor import Actor, current_rank, endpoint, supervise, this_host
from monarch.exceptions import SupervisionError
from monarch.testing import local_hosts

pytestmark = pytest.mark.slow

BIG = 3_000_000


class Worker(Actor):
    """Remote actor for the tests."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def pid(self) -> tuple[int, int]:
        return os.getppid(), os.getpid()

    @endpoint
    def rank(self) -> dict[str, int]:
        return dict(current_rank())

    @endpoint
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    def noted(self) -> list[Any]:
        return self.seen

    @endpoint
    def total(self, data: Any) -> int:
        return int(sum(memoryview(data)[::4096]))

    @endpoint
    def zeros(self, size: int) -> bytes:
        return bytes(size)

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @endpoint
    def ask_all(self, others: Any, value: Any) -> list[Any]:
        return list(others.echo.call(value).get(timeout=30).values())

    @endpoint
    def host(self) -> Any:
        return this_host()

    @endpoint
    def tell_in_order(self, other: Any, count: int) -> None:
        for number in range(count):
            other.note.broadcast((os.getpid(), number))

    @endpoint
    def send_big(self, other: Any, size: int) -> int:
        return other.total.call_one(b"\1" * size).get(timeout=60)


@pytest.fixture(scope="module")
def hosts(own_server: None) -> Iterator[Any]:
    with local_hosts(2) as made:
        # So that all connections exist, which stay.
        procs = made.spawn_procs({"gpus": 2})
        workers = procs.spawn("warm", Worker)
        workers.echo.call(b"x" * BIG).get(timeout=60)
        local = this_host().spawn_procs({"gpus": 2})
        local.spawn("local", Worker).ask_all.call(workers, b"x" * BIG).get(timeout=60)
        procs.stop().get(timeout=30)
        local.stop().get(timeout=30)
        yield made


@pytest.fixture
def workers(hosts: Any) -> Iterator[Any]:
    procs = hosts.spawn_procs({"gpus": 2}, name="procs")
    yield procs.spawn("workers", Worker)
    procs.stop().get(timeout=30)


@pytest.fixture(scope="module", autouse=True)
def own_session() -> Iterator[None]:
    """The agent of this host takes part too; it ends with the module's processes."""
    from monarch.actor import shutdown_context

    yield
    shutdown_context().get(timeout=30)


# What must work


def test_hosts_of_ranks_equal_slices_of_the_mesh(hosts: Any, workers: Any) -> None:
    slices = [hosts.slice(hosts=host) for host in range(2)]
    assert list(workers.host.call().get(timeout=30).values()) == [slices[0], slices[0], slices[1], slices[1]]
    assert len({*slices, *workers.host.call().get(timeout=30).values(), this_host()}) == 3
    assert hosts != slices[0] and hosts == hosts.slice(hosts=slice(0, 2))


def test_calls_and_slices_reach_remote_ranks(workers: Any, leaks: Any) -> None:
    values = workers.rank.call().get(timeout=30)
    assert [dict(value) for value in values.values()] == [
        {"hosts": host, "gpus": gpu} for host in range(2) for gpu in range(2)
    ]
    assert list(workers.slice(hosts=1).echo.call(1).get(timeout=30).values()) == [1, 1]
    assert list(workers.slice(gpus=0).echo.call(2).get(timeout=30).values()) == [2, 2]
    assert workers.slice(hosts=1, gpus=1).echo.call_one(3).get(timeout=30) == 3
    agents = {agent for agent, _ in workers.pid.call().get(timeout=30).values()}
    assert len(agents) == 2


def test_call_is_one_message_per_host(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message out for a call, and one back for its answers."""
    workers.echo.call(0).get(timeout=30)
    sent, got = list[int](), Counter[str]()
    cast, route, handle = Gateway.cast, Gateway.route, current_node().dispatch.handlers

    def count_cast(self: Gateway, src: str, procs: list[str], port: int, frames: Any) -> None:
        sent.append(len(procs))
        cast(self, src, procs, port, frames)

    def not_a_call(self: Gateway, proc: str, frames: Any) -> None:  # Who is silent is asked whether it is there.
        assert not isinstance(m.decode(frames[0]), m.Call), "sent to one by itself"
        route(self, proc, frames)

    def counted(name: str, handler: Callable[..., object]) -> Callable[..., None]:
        def count(message: Any, more: Any) -> None:
            got[name] += 1
            handler(message, more)

        return count

    monkeypatch.setattr(Gateway, "cast", count_cast)
    monkeypatch.setattr(Gateway, "route", not_a_call)
    monkeypatch.setitem(handle, m.Batch, counted("batch", handle[m.Batch]))
    for number in range(10):
        assert list(workers.echo.call(number).get(timeout=30).values()) == [number] * 4
    monkeypatch.undo()
    assert sent == [2] * 20
    # On a busy machine the ranks of a host may answer too far apart for one message.
    assert 20 <= got["batch"] < 30


def test_ranks_of_all_hosts_call_each_other(workers: Any, hosts: Any, procs: Callable[..., Any]) -> None:
    """In all directions, this host included."""
    here = procs(2).spawn("here", Worker)
    assert list(here.ask_all.call(workers, "out").get(timeout=30).values()) == [["out"] * 4] * 2
    assert list(workers.ask_all.call(here, "in").get(timeout=30).values()) == [["in"] * 2] * 4
    first, second = workers.slice(hosts=0), workers.slice(hosts=1)
    assert list(first.ask_all.call(second, 1).get(timeout=30).values()) == [[1, 1]] * 2
    assert list(second.ask_all.call(first, 2).get(timeout=30).values()) == [[2, 2]] * 2
    assert second.slice(gpus=0).ask_all.call_one(second.slice(gpus=slice(1, 2)), 3).get(timeout=30) == [3]


def test_messages_of_one_sender_arrive_in_order_across_hosts(workers: Any) -> None:
    target = workers.slice(hosts=1, gpus=1)
    senders = workers.slice(gpus=0)
    senders.tell_in_order.call(target, 2000).get(timeout=60)
    for number in range(2000):
        target.note.broadcast(("controller", number))
    assert wait_until(lambda: len(target.noted.call_one().get(timeout=30)) == 6000)
    noted = target.noted.call_one().get(timeout=30)
    assert [number for who, number in noted if who == "controller"] == list(range(2000))
    others = {who for who, _ in noted if who != "controller"}
    assert len(others) == 2
    for other in others:
        assert [number for who, number in noted if who == other] == list(range(2000))


def test_large_arguments_and_results_cross_hosts(workers: Any) -> None:
    data = b"\1" * BIG
    expected = len(memoryview(data)[::4096])
    assert list(workers.total.call(data).get(timeout=60).values()) == [expected] * 4
    assert [len(value) for value in workers.zeros.call(BIG).get(timeout=60).values()] == [BIG] * 4
    assert list(workers.slice(hosts=1).echo.call(data).get(timeout=60).values()) == [data] * 2
    one, other = workers.slice(hosts=0, gpus=0), workers.slice(hosts=1, gpus=0)
    assert one.send_big.call_one(other, BIG).get(timeout=60) == expected
    assert other.send_big.call_one(one, BIG).get(timeout=60) == expected


def test_output_of_remote_ranks_arrives(workers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    seen = ""

    def printed() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        ranks = re.findall(r"\[ranks? (\S+)\] hello from afar", seen)
        # From all of them: as one line, or as several on a busy machine.
        return sorted(rank for text in ranks for rank in parse_ranks(text)) == [0, 1, 2, 3]

    workers.say.call("hello from afar").get(timeout=30)
    assert wait_until(printed), seen


# Losing a host


def test_death_of_remote_agent_fails_only_its_calls(own_server: None) -> None:
    with local_hosts(3) as hosts:
        procs = hosts.spawn_procs({"gpus": 2}, name="procs")
        workers = procs.spawn("workers", Worker)
        pids = workers.pid.call().get(timeout=30)
        lost = workers.slice(hosts=1).nap.call(30)
        kept = workers.slice(hosts=2).nap.call(0.5)
        both = workers.nap.call(0.5)
        agent = pids.slice(hosts=1, gpus=0).item()[0]
        mine = [pid for parent, pid in pids.values() if parent == agent]
        start = time.monotonic()
        with supervise(procs) as watch:
            os.kill(agent, signal.SIGKILL)
            with pytest.raises(SupervisionError, match="lost with"):
                lost.get(timeout=20)
            assert time.monotonic() - start < 2
            assert list(kept.get(timeout=20).values()) == ["slept"] * 2
            with pytest.raises(SupervisionError) as caught:
                both.get(timeout=20)
        assert sorted(failure.ranks for failure in watch.failures) == [(2,), (3,)]
        assert caught.value.ranks == (2, 3)
        assert "had not answered by then" in str(caught.value)
        with pytest.raises(SupervisionError):
            workers.slice(hosts=1, gpus=0).echo.call_one(1)
        # Others call each other still, and hear of the loss too.
        first, last = workers.slice(hosts=0), workers.slice(hosts=2)
        assert list(first.ask_all.call(last, 1).get(timeout=30).values()) == [[1, 1]] * 2
        with pytest.raises(Exception, match="host"):
            first.ask_all.call(workers.slice(hosts=1), 1).get(timeout=30)
        assert wait_until(lambda: not any(pid in processes() for pid in mine), 2.0)


PROGRAM = """
import os, sys, time
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import local_hosts

class Worker(Actor):
    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)

if __name__ == "__main__":
    with local_hosts(2) as hosts:
        a = hosts.spawn_procs({"gpus": 2}).spawn("a", Worker)
        b = this_host().spawn_procs({"gpus": 2}).spawn("b", Worker)
        a.nap.call(0).get(timeout=60)
        b.nap.call(0).get(timeout=60)
        if sys.argv[1:] == ["wait"]:
            a.nap.call(1000)
            print("ready", flush=True)
            time.sleep(1000)
    print("done")
"""


def test_clean_end_prints_nothing(program: Callable[..., Any]) -> None:
    ended = program(PROGRAM)
    assert ended.ok() == "done\n"
    assert ended.err == ""


def test_all_hosts_end_with_controller(warm: None, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    before = processes()
    with subprocess.Popen([sys.executable, str(path), "wait"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(processes().keys() - before.keys()) >= 10
        process.kill()
    assert wait_until(lambda: not processes().keys() - before.keys(), 2.0)


# Strangers


class Bomb:
    """Writes to a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.mark.parametrize("who", ["no key", "own key", "wrong server key", "plain"])
def test_peers_without_the_key_are_ignored(hosts: Any, workers: Any, tmp_path: Path, who: str) -> None:
    """Neither by the program nor by an agent; its messages are never unpickled."""
    target = tmp_path / "unpickled"
    node = current_node()
    session = need_session(node)
    workers.echo.call(1).get(timeout=30)
    context = make_context()
    sockets = []
    strange = KeyPair.new()
    bomb = pickle.dumps(((Bomb(str(target)),), {}))
    assert node.hosts.keys is not None
    doors = [(session._address, node.hosts.keys.public)]
    doors += [(address, public.encode()) for address, public in node.hosts.known.values()]
    doors += [(address, public.encode()) for host, (address, public) in session._table.items()]
    proc = workers._members_at().peers[0].proc
    key = workers._key
    messages = [
        m.encode(m.Call(node.proc, key, "note", 0, workers._view_bytes, "", 0, bomb)),
        m.encode(m.Reply(proc, 1, 0, m.RESULT, 0, bomb)),
        m.encode(m.Create(node.proc, "evil", 1, workers._view_bytes, bomb)),
        m.encode(m.Bye(node.proc)),
    ]
    for address, public in doors:
        socket = context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 0)
        if who == "plain":
            socket.set(zmq.PLAIN_USERNAME, b"a")
            socket.set(zmq.PLAIN_PASSWORD, b"b")
        elif who != "no key":
            socket.set(zmq.CURVE_SERVERKEY, strange.public if who == "wrong server key" else public)
            socket.set(zmq.CURVE_PUBLICKEY, strange.public)
            socket.set(zmq.CURVE_SECRETKEY, strange.secret)
            over_network(socket, 5)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_DISCONNECTED
        )
        sockets.append((socket, monitor))
        socket.connect(address)
        socket.send(m.encode(m.Hello(m.VERSION, node.proc, os.getpid())))
        for message in messages:
            socket.send(message)
            socket.send_multipart([m.encode(m.Route(proc, 1)), message])
            socket.send_multipart([m.encode(m.Cast(node.proc, [proc], 0, 1)), message])
    from zmq.utils.monitor import recv_monitor_message

    for _, monitor in sockets:
        # In any case, it must not succeed.
        events = []
        if monitor.poll(1500):
            events.append(recv_monitor_message(monitor)["event"])
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    assert list(workers.echo.call(2).get(timeout=30).values()) == [2] * 4
    assert workers.slice(hosts=0, gpus=0).noted.call_one().get(timeout=30) == []
    assert not target.exists()
    for socket, monitor in sockets:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
    context.term()


def test_garbage_at_every_socket_is_harmless(hosts: Any, workers: Any) -> None:
    import socket

    node = current_node()
    doors = [need_session(node)._address, *(address for address, _ in node.hosts.known.values())]
    doors += [address for address, _ in need_session(node)._table.values()]
    for address in doors:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(data)
    assert list(workers.echo.call(2).get(timeout=30).values()) == [2] * 4
