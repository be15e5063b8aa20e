"""Flow control: a sender far ahead of a slow actor slows down, no message is lost, and memory is bounded."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint
from monarch.exceptions import DeviceMeshError

MB = 1 << 20


def resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Slow(Actor):
    def __init__(self) -> None:
        self.last = -1
        self.wrong = 0
        self.most = 0

    @endpoint
    def take(self, number: int, ballast: bytes = b"") -> None:
        self.wrong += number != self.last + 1
        self.last = number
        if number % 100 == 0:
            # What makes it slow: a hundredth of this for each message.
            time.sleep(0.002)
            self.most = max(self.most, resident())

    @endpoint
    def state(self) -> tuple[int, int, int, int]:
        return self.last, self.wrong, self.most, resident()


class SlowAsync(Slow):
    @endpoint
    async def take(self, number: int, ballast: bytes = b"") -> None:
        Slow.take.method(self, number, ballast)


class Floods(Actor):
    def __init__(self) -> None:
        self.taken = 0

    @endpoint
    def meet(self, other: Any) -> None:
        self.other = other

    @endpoint
    def flood(self, count: int) -> int:
        for _ in range(count):
            self.other.take.broadcast()
        return count

    @endpoint
    def take(self) -> None:
        self.taken += 1

    @endpoint
    def count(self) -> int:
        return self.taken


class FloodsAsync(Floods):
    @endpoint
    async def flood(self, count: int) -> int:
        for _ in range(count):
            self.other.take.broadcast()
        return count


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Slow, SlowAsync])
def test_many_broadcasts_to_a_slow_actor(procs: Any, cls: type) -> None:
    slow = procs(1).spawn("slow", cls).slice(gpus=0)
    _, _, _, before = slow.state.call_one().get(timeout=20)
    ours = resident()
    behind = 0
    for number in range(50_000):
        slow.take.broadcast(number)
        if number % 10_000 == 9_999:
            peer = slow._members_at().peers[0]
            behind = max(behind, peer.sent - (peer.credit - 16_384))
    assert behind <= 20_000, "the sender did not slow down"
    most = resident() - ours
    last, wrong, peak, _ = slow.state.call_one().get(timeout=60)
    assert (last, wrong) == (49_999, 0)
    # Without a bound the receiver would have most of them at once, which is 300 MB.
    assert most < 100 * MB and peak - before < 200 * MB


@pytest.mark.slow
def test_messages_with_ballast_count_for_more(procs: Any) -> None:
    slow = procs(1).spawn("slow", Slow).slice(gpus=0)
    _, _, _, before = slow.state.call_one().get(timeout=20)
    ours = resident()
    # 20,000 times 20 kB, which is 400 MB: below what goes by shared memory.
    ballast = bytes(20_000)
    for number in range(20_000):
        slow.take.broadcast(number, ballast)
    last, wrong, peak, _ = slow.state.call_one().get(timeout=60)
    assert (last, wrong) == (19_999, 0)
    assert resident() - ours < 150 * MB and peak - before < 150 * MB


def test_calls_in_flight_are_bounded_too(procs: Any) -> None:
    slow = procs(2).spawn("slow", Slow)
    futures = [slow.take.call(number) for number in range(20_000)]
    for future in futures:
        future.get(timeout=60)
    assert [state[:2] for state in slow.state.call().get(timeout=20).values()] == [(19_999, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Floods, FloodsAsync])
def test_actors_that_flood_each_other_do_not_hang(procs: Any, cls: type) -> None:
    one, two = procs(1).spawn("one", cls), procs(1).spawn("two", cls)
    one.meet.call_one(two).get(timeout=20)
    two.meet.call_one(one).get(timeout=20)
    floods = [one.flood.call_one(25_000), two.flood.call_one(25_000)]
    assert [flood.get(timeout=60) for flood in floods] == [25_000] * 2
    # To each it is the other that sends, so this may overtake the last of it.
    for each in (one, two):
        assert wait_until(lambda each=each: each.count.call_one().get(timeout=60) == 25_000, 60)


def test_actor_that_floods_itself_does_not_hang(procs: Any) -> None:
    one = procs(1).spawn("one", Floods)
    one.meet.call_one(one).get(timeout=20)
    assert one.flood.call_one(20_000).get(timeout=60) == 20_000
    assert one.count.call_one().get(timeout=60) == 20_000


def test_death_frees_a_sender_that_waits_for_room(procs: Any) -> None:
    class Stuck(Actor):
        @endpoint
        def take(self, number: int) -> None:
            if number == 100:
                signal.pause()

        @endpoint
        def pid(self) -> int:
            return os.getpid()

    stuck = procs(1).spawn("stuck", Stuck).slice(gpus=0)
    pid, peer = stuck.pid.call_one().get(timeout=20), stuck._members_at().peers[0]

    def kill() -> None:
        assert wait_until(lambda: peer.sent >= peer.credit)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DeviceMeshError, match="was killed by signal 9"):
        for number in range(1_000_000):
            stuck.take.broadcast(number)
    killer.join()
