"""Room at receivers: a sender waits a bounded time, its error names the receiver, and no credit is lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes.actors import backpressure
from monarch._node.current import current_node
from monarch.actor import Actor, endpoint
from monarch.exceptions import ArgumentError, CallTimeoutError, SendTimeoutError


class Counts(Actor):
    def __init__(self) -> None:
        self.taken: list[int] = []

    @endpoint
    def take(self, number: int) -> int:
        self.taken.append(number)
        return number

    @endpoint
    def all(self) -> list[int]:
        return self.taken

    @endpoint
    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def hold(self, gate: Path) -> None:
        """Wait until a file exists."""
        while not gate.exists():
            time.sleep(0.005)

    @endpoint
    def tune(self, seconds: float) -> None:
        sys.setswitchinterval(seconds)

    @endpoint
    def lose(self, credit: int) -> None:
        """Lose credit, as an error in the counting would."""
        for finished in current_node().replies.counts.values():
            finished.total -= credit

    @endpoint
    def call_other(self, other: Any, count: int) -> str:
        try:
            for number in range(count):
                other.take.broadcast(number)
        except SendTimeoutError as error:
            return str(error)
        return ""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "ROOM_S", 0.5)


def fill(mesh: Any) -> int:
    """Send until the first rank, which handles nothing, has no room; return the number of messages."""
    peer = mesh._members_at().peers[0]
    sent = 0
    while peer.done:
        mesh.take.broadcast(sent)
        sent += 1
    return sent


def test_call_without_room_fails_naming_the_receiver(procs: Any, impatient: None, tmp_path: Path) -> None:
    mesh = procs(2).spawn("busy", Counts)
    one = mesh.slice(gpus=1)
    gate = tmp_path / "gate"
    held = one.hold.call_one(gate)
    sent = fill(one)
    ports = set(current_node().ports.gathers)
    begin = time.monotonic()
    with pytest.raises(
        SendTimeoutError, match=r"busy\.take\(\) was not sent to any rank: rank 1 of busy is 16,38"
    ) as error:
        mesh.take.call(7)
    assert (error.value.mesh, error.value.rank) == ("busy", 1)
    assert error.value.behind >= 16_384 and isinstance(error.value, CallTimeoutError)
    assert time.monotonic() - begin > 0.4
    assert set(current_node().ports.gathers) <= ports, "the port of a call that was not sent stays open"
    with pytest.raises(SendTimeoutError, match=r"busy\[gpus=1\] is 16,38.* messages behind"):
        one.take.broadcast(7)
    # Neither the one with room nor the one without got it; all that was sent before comes.
    gate.touch()
    held.get(timeout=20)
    assert mesh.slice(gpus=0).all.call_one().get(timeout=20) == []
    assert one.all.call_one().get(timeout=20) == list(range(sent))


def test_a_call_after_lost_credit_fails_and_does_not_hang(procs: Any, impatient: None) -> None:
    poor = procs(1)
    mesh = poor.spawn("poor", Counts).slice(gpus=0)
    mesh.lose.call_one(16_384).get(timeout=20)
    with pytest.raises(SendTimeoutError, match=r"has finished none for 0\.5 s"):
        for _ in range(40):
            for future in [mesh.take.call_one(number) for number in range(1_000)]:
                future.get(timeout=20)
    # It is known to have lost some.
    poor.stop().get(timeout=20)


def test_actor_without_room_raises_too(procs: Any, tmp_path: Path) -> None:
    def be_impatient() -> None:
        backpressure.ROOM_S = 0.5

    slow = procs(1).spawn("slow", Counts).slice(gpus=0)
    senders = procs(1, bootstrap=be_impatient)
    sender = senders.spawn("sender", Counts).slice(gpus=0)
    held = slow.hold.call_one(tmp_path / "gate")
    text = sender.call_other.call_one(slow, 40_000).get(timeout=30)
    assert "slow.take() was not sent to any rank: slow is 16,38" in text
    (tmp_path / "gate").touch()
    held.get(timeout=20)


@pytest.mark.slow
def test_slow_receiver_causes_no_timeout(procs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Progress counts, also of messages without an answer."""
    monkeypatch.setattr(backpressure, "ROOM_S", 1.5)
    monkeypatch.setattr(backpressure, "_ASK_EVERY_S", 0.1)
    mesh = procs(1).spawn("slow", Counts).slice(gpus=0)
    held = mesh.hold.call_one(tmp_path / "gate")
    fill(mesh)
    (tmp_path / "gate").touch()
    held.get(timeout=20)
    begin = time.monotonic()
    for _ in range(4):
        mesh.pause.broadcast(1.0)
    for number in range(20_000):
        mesh.take.broadcast(number)
    assert time.monotonic() - begin > 2.0
    mesh.all.call_one().get(timeout=30)


def test_all_threads_waiting_for_room_continue(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1).spawn("busy", Counts).slice(gpus=0)
    held = mesh.hold.call_one(tmp_path / "gate")
    fill(mesh)
    done: list[int] = []

    def send(number: int) -> None:
        for _ in range(200):
            mesh.take.broadcast(number)
        done.append(number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    (tmp_path / "gate").touch()
    held.get(timeout=20)
    for thread in threads:
        thread.join(30)
    assert sorted(done) == list(range(6))


@pytest.mark.parametrize("values", [1, bytes(500_000)], ids=["plain", "buffers"])
def test_send_that_fails_midway_keeps_neither_room_nor_port(
    procs: Any, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = procs(2).spawn("actors", Counts)
    actors.all.call().get(20)
    node = current_node()
    first, second = actors._members_at().peers
    ports, rooms = len(node.ports.gathers), [peer.window.statistics().sent for peer in (first, second)]

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(second, "send", fails)
        with pytest.raises(MemoryError, match="no memory"):
            actors.take.call(values)
    assert len(node.ports.gathers) == ports
    assert first.window.statistics().sent > rooms[0]
    assert second.window.statistics().sent == rooms[1]
    taken = actors.all.call().get(20)
    assert [len(each) for each in taken.values()] == [1, 0]


@pytest.mark.parametrize("values", [1, bytes(500_000)], ids=["plain", "buffers"])
def test_interrupt_before_a_call_is_sent_closes_its_port(
    procs: Any, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = procs(1).spawn("actors", Counts)
    actors.all.call().get(20)
    ports = current_node().ports
    before, opens = set(ports.gathers), ports.open_call

    def interrupted(call: Any) -> int:
        opens(call)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ports, "open_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            actors.take.call(values)
    assert set(ports.gathers) == before
    assert actors.all.call_one().get(20) == []


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_invalid_room_timeout_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="MONARCH_ROOM_TIMEOUT: expected a number of seconds above 0"):
        backpressure.room_timeout(text)
    assert (backpressure.room_timeout(None), backpressure.room_timeout("2.5")) == (60.0, 2.5)


def test_four_actors_of_a_rank_lose_no_credit(procs: Any) -> None:
    """A short switch interval lets threads of a rank and of the program meet at any step."""
    mesh = procs(1)
    actors: list[Any] = [mesh.spawn(f"a{index}", Counts).slice(gpus=0) for index in range(4)]
    for actor in actors:
        actor.tune.call_one(1e-6).get(timeout=20)
    peer = actors[0]._members_at().peers[0]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(lambda index: [future.get() for future in [actors[index].take.call_one(n) for n in range(2_000)]])
    finally:
        sys.setswitchinterval(before)
    assert wait_until(lambda: peer.window.behind == 0), peer.window.statistics()


def together(work: Callable[[int], Any]) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
