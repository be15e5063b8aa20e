"""Processes that die while a call to them is made: it fails, and does not wait for an answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes.inside import targets_of
from monarch._meshes.procs.replace import Arrival
from monarch._meshes.procs.state import DeathFuture
from monarch._node.current import current_node
from monarch._node.peers.port_table import PortTable
from monarch._supervision.watch import FailureWatch
from monarch.actor import Actor, endpoint, heal_mesh
from monarch.exceptions import ActorError, DeviceMeshError

SOON = 20


class Echo(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def say(self, value: Any) -> Any:
        return value

    @endpoint
    def sleep(self) -> None:
        time.sleep(1000)


def kill(actors: Any, pid: int) -> None:
    """Kill the process of the last actor, and wait until the open calls to it have failed."""
    last = len(actors) - 1
    waiting = actors.slice(gpus=last).sleep.call_one()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(waiting.exception(timeout=SOON), DeviceMeshError)


class Kills:
    """Kills a process while it is pickled."""

    def __init__(self, actors: Any) -> None:
        self.actors = actors
        self.pid = list(actors.pid.call().get(timeout=SOON).values())[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        kill(self.actors, self.pid)
        return int, ()


ADVERBS: dict[str, Callable[[Any, Kills], Any]] = {
    "call": lambda actors, kills: actors.say.call(kills),
    "call_one": lambda actors, kills: actors.slice(gpus=1).say.call_one(kills),
    "choose": lambda actors, kills: actors.slice(gpus=1).say.choose(kills),
    "call_each": lambda actors, kills: actors.say.call_each([1, kills]),
    "stream": lambda actors, kills: next(iter(actors.slice(gpus=1).say.stream(kills))),
}


@pytest.mark.parametrize("adverb", ADVERBS)
def test_call_fails_if_its_process_dies_during_pickling(procs: Any, adverb: str) -> None:
    actors = procs(2).spawn("echo", Echo)
    future = ADVERBS[adverb](actors, Kills(actors))
    with pytest.raises(DeviceMeshError, match="rank 1 of"):
        future.get(timeout=SOON)
    assert actors.slice(gpus=0).say.call_one("alive").get(timeout=SOON) == "alive"


def before_port_of(kind: type, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something once, just before a future of some kind gets its port."""
    opened, left = PortTable.open, [action]

    def late(self: PortTable, sink: Any) -> int:
        if isinstance(sink, kind) and left:
            left.pop()()
        return opened(self, sink)

    monkeypatch.setattr(PortTable, "open", late)


def test_stop_of_a_process_that_dies_as_it_begins_ends(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(1)
    actors = mesh.spawn("echo", Echo)
    pid = actors.pid.call_one().get(timeout=SOON)
    before_port_of(DeathFuture, lambda: kill(actors, pid), monkeypatch)
    assert mesh.stop().get(timeout=SOON) is None


def test_heal_takes_another_process_for_a_spare_one_that_dies(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(1, spares=1)
    actors = mesh.spawn("echo", Echo)
    node, starting = current_node(), mesh._state.starting
    assert starting is not None and wait_until(lambda: set(starting.waiting()) <= node.peers.pids.keys())
    kill(actors, actors.pid.call_one().get(timeout=SOON))

    def die() -> None:
        # The spare has the rank by now.
        peer = targets_of(actors).peers[0]
        os.kill(node.peers.pids[peer.proc], signal.SIGKILL)
        assert wait_until(lambda: peer.dead is not None and peer.proc not in node.peers.pids)

    before_port_of(Arrival, die, monkeypatch)
    heal_mesh(mesh)
    assert actors.say.call_one("alive").get(timeout=SOON) == "alive"


class Reduces(Actor):
    @endpoint
    def reduce(self) -> None:
        import torch
        from torch import distributed

        distributed.all_reduce(torch.ones(1))

    @endpoint
    def fail(self) -> None:
        raise ValueError("bad sample")


def test_call_made_while_another_fails_is_freed(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = procs(2).spawn("reduces", Reduces)
    actors.reduce.call().get(timeout=60)
    under_way, begun, made = FailureWatch._under_way, threading.Event(), threading.Event()

    def late(self: FailureWatch, uid: str) -> Any:
        found = list(under_way(self, uid))
        begun.set()
        made.wait(SOON)
        return iter(found)

    monkeypatch.setattr(FailureWatch, "_under_way", late)
    failing = actors.slice(gpus=0).fail.call_one()
    assert begun.wait(SOON)
    waiting = actors.slice(gpus=1).reduce.call_one()
    made.set()
    with pytest.raises(ActorError, match="rank 0 failed before joining it"):
        waiting.get(timeout=SOON)
    assert isinstance(failing.exception(timeout=SOON), ActorError)


class Big(Actor):
    @endpoint
    def big(self, begun: Path | None) -> bytes:
        if begun is not None:
            begun.touch()
            while not any(peer.dead for peer in list(current_node().peers.known.values())):
                time.sleep(0.01)
        return bytes(4 << 20)

    @endpoint
    def live(self) -> int:
        return current_node().bulk.segments.stats().live


class Caller(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, big: Any, begun: Path | None) -> int:
        return len(big.big.call_one(begun).get())


def test_answer_to_a_dead_caller_takes_no_shared_memory(procs: Any, tmp_path: Path) -> None:
    big, caller = procs(1).spawn("big", Big), procs(1).spawn("caller", Caller)
    pid = caller.pid.call_one().get(timeout=SOON)
    caller.ask.call_one(big, None).get(timeout=SOON)
    asking = caller.ask.call_one(big, tmp_path / "begun")
    assert wait_until((tmp_path / "begun").exists)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(asking.exception(timeout=SOON), DeviceMeshError)
    assert big.live.call_one().get(timeout=SOON) == 0
