"""Channels: ports in messages, which any actor can answer."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy
import pytest

from leaks import wait_until
from monarch._node.current import open_node
from monarch.actor import Actor, Channel, Port, PortReceiver, current_rank, endpoint
from monarch.exceptions import CallTimeoutError, SerializationError, StoppedError


class Teller(Actor):
    @endpoint
    def tell(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def fail(self, port: Port[Any]) -> None:
        port.exception(ValueError("sent as it is"))

    @endpoint
    def open(self) -> Any:
        self.port, self.receiver = Channel.open()
        return self.port

    @endpoint
    def wait(self) -> Any:
        return self.receiver.recv().get()

    @endpoint
    def hand_on(self, other: Any, port: Port[Any]) -> None:
        other.tell.broadcast(port, [current_rank().rank])

    @endpoint(explicit_response_port=True)
    def count(self, port: Port[int], upto: int) -> None:
        for number in range(upto):
            port.send(number)


@pytest.fixture
def tellers(procs: Any) -> Any:
    return procs(2).spawn("tellers", Teller)


@pytest.fixture
def channel() -> Any:
    port, receiver = Channel.open()
    yield port, receiver
    receiver.close()


def test_values_of_one_sender_come_in_order(tellers: Any, channel: Any) -> None:
    port, receiver = channel
    tellers.slice(gpus=0).tell.broadcast(port, list(range(1000)))
    assert [receiver.recv().get(timeout=20) for _ in range(1000)] == list(range(1000))


def test_recv_returns_values_sent_before_and_after(tellers: Any, channel: Any) -> None:
    port, receiver = channel
    early = [receiver.recv() for _ in range(3)]
    tellers.slice(gpus=0).tell.call_one(port, [1, 2, 3, 4]).get(timeout=20)
    assert [future.get(timeout=20) for future in early] == [1, 2, 3]

    async def main() -> Any:
        return await receiver.recv()

    assert asyncio.run(main()) == 4
    late = receiver.recv()
    with pytest.raises(TimeoutError):
        late.get(timeout=0.05)
    port.send("from here")
    assert late.get(timeout=20) == "from here"


def test_once_port_takes_one_value(host: Any, tellers: Any) -> None:
    port, receiver = Channel.open(once=True)
    tellers.tell.call(port, ["a", "b"]).get(timeout=20)
    assert receiver.recv().get(timeout=20) == "a"
    second = receiver.recv()
    with pytest.raises(StoppedError, match="has received the only value of its channel"):
        second.get(timeout=20)


def test_exceptions_are_raised_as_they_were_sent(tellers: Any, channel: Any) -> None:
    port, receiver = channel
    tellers.slice(gpus=0).fail.broadcast(port)
    with pytest.raises(ValueError, match=r"^sent as it is$") as caught:
        receiver.recv().get(timeout=20)
    assert type(caught.value) is ValueError


def test_ports_travel_from_actor_to_actor(tellers: Any, channel: Any, procs: Any) -> None:
    port, receiver = channel
    other = procs(1).spawn("other", Teller)
    tellers.hand_on.broadcast(other, port)
    assert {receiver.recv().get(timeout=20) for _ in range(2)} == {0, 1}
    there = other.open.call_one().get(timeout=20)
    waiting = other.wait.call_one()
    there.send({"from": "here"})
    assert waiting.get(timeout=20) == {"from": "here"}


def test_ranked_receiver_returns_the_sender(tellers: Any) -> None:
    from monarch.actor import send

    port, receiver = Channel.open_ranked()
    send(tellers.count, (2,), {}, port)
    pairs = sorted(receiver.recv().get(timeout=20) for _ in range(4))
    assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1)]
    receiver.close()


def test_sending_to_a_closed_receiver_is_no_error(tellers: Any) -> None:
    port, receiver = Channel.open()
    receiver.close()
    assert set(tellers.tell.call(port, [1]).get(timeout=20).values()) == {None}
    port.send(2)


def test_unpicklable_value_raises_at_the_sender(channel: Any) -> None:
    port, _ = channel
    with pytest.raises(SerializationError, match="lock"):
        port.send(threading.Lock())


def test_channels_carry_large_values(tellers: Any, channel: Any) -> None:
    port, receiver = channel
    tellers.slice(gpus=1).tell.broadcast(port, [numpy.arange(1_000_000)])
    array = receiver.recv().get(timeout=20)
    assert array.sum() == 499999500000
    del array


def test_recv_of_a_closed_receiver_fails_once_all_is_read(tellers: Any) -> None:
    port, receiver = Channel.open()
    tellers.slice(gpus=0).tell.call_one(port, [1, 2]).get(timeout=20)
    first = receiver.recv()
    assert first.get(timeout=20) == 1
    second, waits = receiver.recv(), receiver.recv()
    assert second.get(timeout=20) == 2
    receiver.close()
    for late in (waits, receiver.recv()):
        with pytest.raises(StoppedError, match="the receiver was closed"):
            late.get(timeout=20)


@pytest.mark.parametrize("opener", [Channel.open, Channel.open_ranked])
def test_dropped_channels_leave_no_open_port(procs: Any, opener: Any) -> None:
    procs(1)
    kept = opener()
    ports = open_node().ports
    before = len(ports.sinks)
    for _ in range(200):
        opener()
    opener()
    open_node().bulk.settle()
    assert len(ports.sinks) == before
    assert kept[1].port in ports.sinks
    kept[1].close()


def test_recv_gets_its_value_when_the_receiver_is_dropped(tellers: Any) -> None:
    def ask() -> Any:
        port, receiver = Channel[Any].open()
        return port, receiver.recv()

    port, value = ask()
    gc.collect()
    Channel[Any].open()
    tellers.slice(gpus=0).tell.broadcast(port, ["late"])
    assert value.get(30) == "late"
    open_node().bulk.settle()


def test_dropped_wait_gives_its_place_to_the_next(procs: Any) -> None:
    procs(1)
    port, receiver = Channel[int].open()
    for _ in range(3):
        with pytest.raises(CallTimeoutError):
            receiver.recv().get(timeout=0.01)
    kept, last = receiver.recv(), receiver.recv()
    for number in range(3):
        port.send(number)
    assert (kept.get(20), last.get(20), receiver.recv().get(20)) == (0, 1, 2)
    # The value of a future that was not read comes back before the later ones.
    unread = [receiver.recv()]
    port.send(3)
    port.send(4)
    assert wait_until(lambda: unread[0].done)
    unread.clear()
    assert [receiver.recv().get(20), receiver.recv().get(20)] == [3, 4]
    told: list[int] = []
    receiver.recv().add_done_callback(lambda future: told.append(future.get()))
    port.send(5)
    assert wait_until(lambda: told == [5])
    receiver.close()


def test_cancelled_await_loses_no_value(procs: Any) -> None:
    procs(1)
    port, receiver = Channel[int].open()

    async def polls() -> list[int]:
        values: list[int] = []
        for number in range(4):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receiver.recv(), 0.01)
            waiting = asyncio.ensure_future(_received(receiver))
            await asyncio.sleep(0)
            port.send(number)
            values.append(await asyncio.wait_for(waiting, 20))
        return values

    assert asyncio.run(polls()) == [0, 1, 2, 3]
    receiver.close()


async def _received(receiver: PortReceiver[int]) -> int:
    return await receiver.recv()


def test_polling_threads_lose_no_value(procs: Any) -> None:
    procs(1)
    port, receiver = Channel[int].open()
    values: list[int] = []

    def poll() -> None:
        while len(values) < 300:
            with suppress(CallTimeoutError):
                values.append(receiver.recv().get(timeout=0.0005))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=poll) for _ in range(3)]
        for each in threads:
            each.start()
        for number in range(300):
            port.send(number)
        assert wait_until(lambda: len(values) == 300)
    finally:
        values.extend([-1] * (300 - len(values)))
        sys.setswitchinterval(before)
    for each in threads:
        each.join(20)
    assert sorted(values) == list(range(300))
    receiver.close()


def test_value_given_back_goes_to_one_waiter(procs: Any) -> None:
    """Two threads pass on the same value, and neither takes a waiter without a value."""
    procs(1)
    port, receiver = Channel[int].open()
    unread = [receiver.recv()]
    port.send(1)
    assert wait_until(lambda: unread[0].done)
    node = open_node()
    threads = [threading.Thread(target=receiver._pass_on) for _ in range(2)]

    def all_wait() -> bool:
        frames = sys._current_frames()
        return all(each.ident in frames and frames[each.ident].f_code.co_name == "_pass_on" for each in threads)

    with node.peers.lock:
        # It comes back while two others wait.
        waiting = [receiver.recv(), receiver.recv()]
        unread.clear()
        for each in threads:
            each.start()
        assert wait_until(all_wait)
    for each in threads:
        each.join(20)
    assert waiting[0].get(20) == 1
    port.send(2)
    assert waiting[1].get(20) == 2
    receiver.close()
