"""Processes that die while a call to them is made: it fails, and does not wait for an answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes.inside import targets_of
from monarch._meshes.procs.replace import Arrival
from monarch._meshes.procs.state import Ended
from monarch._node.current import current_node
from monarch._node.peers.port_table import PortTable
from monarch.actor import Actor, endpoint, heal_mesh
from monarch.exceptions import DeviceMeshError

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
def test_call_to_a_process_that_dies_while_its_arguments_are_pickled_fails(procs: Any, adverb: str) -> None:
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
    before_port_of(Ended, lambda: kill(actors, pid), monkeypatch)
    mesh.stop().get(timeout=SOON)


def test_heal_takes_another_process_for_a_spare_one_that_dies(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(1, spares=1)
    actors = mesh.spawn("echo", Echo)
    kill(actors, actors.pid.call_one().get(timeout=SOON))
    node = current_node()

    def die() -> None:
        # The spare has the rank by now.
        peer = targets_of(actors).peers[0]
        os.kill(node.peers.pids[peer.proc], signal.SIGKILL)
        assert wait_until(lambda: peer.dead is not None and peer.proc not in node.peers.pids)

    before_port_of(Arrival, die, monkeypatch)
    heal_mesh(mesh)
    assert actors.say.call_one("alive").get(timeout=SOON) == "alive"
