"""State that the sending threads of one process share: created once, read whole, and no waiter forgotten."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest

from leaks import wait_until
from monarch._core.shapes.region import Region
from monarch._meshes.registry import meshes_of
from monarch._node import bulk
from monarch._node.current import current_node
from monarch._node.peers.gateway import Gateway
from monarch._procs.session_folder import ipc_address
from monarch._session.statistics import statistics_of
from monarch._wire import messages as m
from monarch._wire.links import Link
from monarch.actor import Actor, endpoint


@pytest.fixture
def often() -> Iterator[None]:
    """Set a short switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """Run a function in several threads at once; return the result or error of each."""
    begin, results = threading.Barrier(count), list[Any]([None] * count)

    def run(number: int) -> None:
        begin.wait(10)
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Keeper(Actor):
    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def keep(self, value: Any) -> int:
        self.kept = value
        return len(value)

    @endpoint
    def give(self) -> Any:
        return self.kept

    @endpoint
    def drop(self, after: float = 0.0) -> None:
        time.sleep(after)
        self.kept = None


def test_a_mesh_that_is_resized_is_read_in_one_state(procs: Any, often: None) -> None:
    """Each call has one answer per named rank, even during a resize."""
    mesh = procs(2).spawn("some", Keeper)
    mesh.drop.call().get(timeout=20)
    procs_of, ends = mesh._state.procs, threading.Event()
    life = procs_of._life
    small = life.roster
    wide = replace(small, per_host=4, sizes=(4,))
    wrong: list[Any] = []

    def look() -> None:
        while not ends.is_set():
            try:
                targets = mesh._members_at()
            except Exception as error:
                wrong.append(error)
                return
            region = Region.unpack(m.unpack(targets.shape.packed))
            if len(targets.peers) != region.nelements or targets.shape.region != region:
                wrong.append(targets)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    node, version = current_node(), small.version
    for rank in (2, 3):
        # As if they were there; nothing is sent to them.
        node.peers.gone(wide.proc(procs_of.uid, rank))
    for turn in range(400):
        version += 1
        procs_of.learn(replace(wide if turn % 2 == 0 else small, version=version))
    ends.set()
    for reader in readers:
        reader.join(20)
    assert not wrong
    targets = mesh._members_at()
    assert len(targets.peers) == len(mesh) == 2 and targets.version == version
    for rank in (2, 3):
        node.peers.known.pop(wide.proc(procs_of.uid, rank))


def test_two_threads_start_one_runner(procs: Any, often: None) -> None:
    for _ in range(3):
        mesh = procs(1)
        node = current_node()
        before = set(meshes_of(node).actor_meshes)
        results = together(lambda number, mesh=mesh: list(mesh.execute(int, number).values()))
        assert results == [[0], [1], [2], [3]]
        assert len(set(meshes_of(node).actor_meshes) - before) == 1


def test_two_threads_make_one_connection_to_a_process(host: Any, often: None) -> None:
    """With two connections, messages would lose their order."""
    node = current_node()
    made: list[Any] = []

    def new_gateway(host: str) -> Gateway:
        link = Link(node.hosts.context, ipc_address(node.folder, node.agent), node.hosts.hello)
        made.append(Gateway(link, f"{host}/agent", False))
        time.sleep(0.001)
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.hosts, "_new_gateway", new_gateway)
        gateways = together(lambda _: node.hosts.gateway("nowhere"))
    assert made == [gateways[0]] and len(set(map(id, gateways))) == 1
    node.hosts.gateways.pop("nowhere").close()
    peers = together(lambda _: node.peers.get(f"{node.host}/nobody-1.0"))
    assert len(set(map(id, peers))) == 1
    assert wait_until(lambda: peers[0].dead is not None)


def test_all_waiters_for_shared_memory_wake(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "SPACE_S", 20.0)
    mesh = procs(4).spawn("keepers", Keeper)
    node = current_node()
    held, wanted = numpy.zeros(3 << 20, numpy.uint8), numpy.zeros(600_000, numpy.uint8)
    others = node.bulk.segments.stats().live_bytes
    mesh.slice(gpus=0).keep.call_one(held).get(timeout=20)
    before, begin = node.bulk.segments.stats().live, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.bulk.segments, "live_limit", others + (2 << 20))
        # The large segment is not used again for a small message, which would count in full.
        patch.setattr(node.bulk.segments, "idle_limit", 0)
        assert node.bulk.segments.over_limit
        calls = [threading.Thread(target=mesh.slice(gpus=rank).keep.call_one, args=(wanted,)) for rank in (1, 2, 3)]
        for call in calls:
            call.start()
        assert wait_until(lambda: statistics_of(node).waiting_for_memory == 3)
        mesh.slice(gpus=0).drop.call_one().get(timeout=20)
        for call in calls:
            call.join(15)
            assert not call.is_alive(), "one of those that wait was not woken"
    assert time.monotonic() - begin < 15
    # By shared memory, and not by the socket.
    assert wait_until(lambda: node.bulk.segments.stats().live >= before + 2)
    mesh.drop.call().get(timeout=20)


def test_threads_that_read_large_results_count_each(procs: Any, often: None) -> None:
    keeper = procs(1).spawn("keeper", Keeper).slice(gpus=0)
    node = current_node()
    data = os.urandom(1 << 20)
    keeper.keep.call_one(numpy.frombuffer(data, numpy.uint8)).get(timeout=20)
    echoes = together(lambda _: [bytes(keeper.give.call_one().get(timeout=20)) == data for _ in range(20)])
    assert echoes == [[True] * 20] * 4
    gc.collect()
    assert wait_until(lambda: statistics_of(node).mapped == 0)
