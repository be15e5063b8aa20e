"""Meshes that are stopped while they are healed, resized or given spare processes: no process outlives the stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from leaks import wait_until
from monarch._core.roster import split_proc
from monarch._meshes.inside import state_of
from monarch._meshes.procs import replace, resize
from monarch._meshes.procs.starting import SPARE, ProcStarter
from monarch._node.current import current_node
from monarch.actor import Actor, endpoint, heal_mesh
from monarch.exceptions import DeviceMeshError, StoppedError

SOON = 20


class Echo(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(1000)


def kill_last(mesh: Any) -> None:
    """Kill the process of the last rank, and wait until its death is known."""
    last = mesh.spawn("echo", Echo).slice(gpus=len(mesh) - 1)
    pid = last.pid.call_one().get(timeout=SOON)
    waiting = last.sleep.call_one()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(waiting.exception(timeout=SOON), DeviceMeshError)


def living(mesh: Any) -> list[str]:
    """Return the processes of a mesh that live, or are about to."""
    peers, uid = current_node().peers.known, state_of(mesh).procs.uid
    return [proc for proc, peer in list(peers.items()) if peer.dead is None and split_proc(proc)[0] == uid]


def all_end(mesh: Any) -> bool:
    """Whether all processes of a mesh end soon, the spare ones included."""
    mesh.stop().get(timeout=SOON)
    return wait_until(lambda: not living(mesh))


def before(
    place: Any,
    name: str,
    action: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[..., bool] = lambda *_: True,
) -> None:
    """Do something once, just before a function is called with some arguments."""
    function, left = getattr(place, name), [action]

    def late(*args: Any, **options: Any) -> Any:
        if left and when(*args):
            left.pop()()
        return function(*args, **options)

    monkeypatch.setattr(place, name, late)


def stop(mesh: Any) -> Callable[[], object]:
    """Return a step that stops a mesh to the end."""
    return lambda: mesh.stop().get(timeout=SOON)


@pytest.mark.parametrize("spares", [0, 1])
def test_heal_that_a_stop_overtakes_starts_nothing(procs: Any, spares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(2, spares=spares)
    kill_last(mesh)
    # The heal has seen that the mesh runs.
    before(replace, "check_room", stop(mesh), monkeypatch)
    with pytest.raises(StoppedError, match="was stopped before it was healed"):
        heal_mesh(mesh)
    assert all_end(mesh)


def test_resize_that_a_stop_overtakes_starts_nothing(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(1)
    before(resize, "check_room", stop(mesh), monkeypatch)
    with pytest.raises(StoppedError, match="was stopped before it was resized"):
        mesh.resize(gpus=3)
    assert len(mesh) == 1
    assert all_end(mesh)


def test_heal_of_a_mesh_that_is_stopped_adds_no_spares(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(1, spares=1)
    kill_last(mesh)
    before(ProcStarter, "fill", stop(mesh), monkeypatch)
    with pytest.raises(StoppedError, match="no more spare processes"):
        heal_mesh(mesh)
    assert all_end(mesh)


@pytest.mark.parametrize("change", [heal_mesh, lambda mesh: mesh.resize(gpus=3)], ids=["heal", "resize"])
def test_new_processes_end_if_stopped_before_they_start(
    procs: Any, change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = procs(2)
    if change is heal_mesh:
        kill_last(mesh)
    # They have their names by now, but no agent knows them.
    before(ProcStarter, "start", mesh.stop, monkeypatch)
    # They may be set up before the stop reaches them, as if it had come just after.
    with suppress(DeviceMeshError):
        change(mesh)
    assert all_end(mesh)


def test_spares_end_if_the_stop_was_sent_before_they_start(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = procs(1, spares=1)
    kill_last(mesh)
    before(ProcStarter, "_spawn", mesh.stop, monkeypatch, lambda *args: SPARE in args[3])
    heal_mesh(mesh)
    assert all_end(mesh)
