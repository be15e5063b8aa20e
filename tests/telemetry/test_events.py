"""The events of real meshes: what happens to ranks and calls is in their log, and the state follows from it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leaks import wait_until
from monarch._core.telemetry.calling import calling
from monarch._core.telemetry.events import CallAnswered, CallsSkipped, CallStarted, Entry, MeshStarted, RankState
from monarch._core.telemetry.fold import fold
from monarch._node.peers.peer import GonePeer
from monarch._node.peers.port_table import PortTable
from monarch._telemetry.calls import LISTED, ProcessCalls
from monarch._telemetry.collector import telemetry_of
from monarch.actor import Actor, endpoint, heal_mesh
from monarch.exceptions import ActorError, ArgumentError, MonarchError
from monarch.telemetry import state_of


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    @endpoint
    def fail(self) -> None:
        raise ValueError("bad sample 17\nand more")


class NotedCall:
    """The part of a call that its log needs."""

    port, label, done, sent_at = 0, "m.echo()", False, 0.0
    title: tuple[str, int] = ("", 0)

    def __init__(self) -> None:
        self.targets = [GonePeer(cast("Any", None), "h/m.0")]

    def lost(self, *_: Any) -> bool:
        return False

    def waits_for(self) -> list[Any]:
        return self.targets


def kinds(mesh: Any) -> dict[str, int]:
    return mesh.events().kinds()


def calls_of(mesh: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(entry.event.title, entry.event.ranks) for entry in mesh.events() if type(entry.event) is CallStarted]


def test_start_and_stop_of_a_mesh_are_events(procs: Callable[..., Any]) -> None:
    mesh = procs(2, name="mesh")
    first = mesh.events()[0].event
    assert isinstance(first, MeshStarted)
    assert (first.name, first.labels, first.sizes, len(first.hosts)) == ("mesh", ("gpus",), (2,), 2)
    mesh.initialized.get(30)
    model = state_of(mesh)
    assert [rank.state for rank in model.ranks] == [RankState.IDLE, RankState.IDLE]
    pids = mesh.spawn("workers", Worker).pid.call().get(30)
    assert [rank.pid for rank in model.ranks] == list(pids.values())
    mesh.stop().get(30)
    model = state_of(mesh)
    assert [rank.state for rank in model.ranks] == [RankState.STOPPED, RankState.STOPPED]
    assert model.reason == "stopped by its owner" and "mesh ended" in kinds(mesh)


def test_call_runs_until_its_ranks_answer(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(2, name="mesh")
    workers = mesh.spawn("workers", Worker)
    workers.pid.call().get(30)
    one, both = str(tmp_path / "one"), str(tmp_path / "both")
    call = workers.wait_for.call(both)
    other = workers.slice(gpus=1).wait_for.call(one)
    assert wait_until(lambda: [rank.state for rank in state_of(mesh).ranks] == [RankState.RUNNING] * 2)
    assert [len(rank.calls) for rank in state_of(mesh).ranks] == [1, 2]
    open(both, "w").close()
    call.get(30)
    assert wait_until(lambda: [len(rank.calls) for rank in state_of(mesh).ranks] == [0, 1])
    open(one, "w").close()
    other.get(30)
    assert wait_until(lambda: [rank.state for rank in state_of(mesh).ranks] == [RankState.IDLE] * 2)
    assert calls_of(mesh)[1:] == [("workers.wait_for", (0, 1)), ("workers[gpus=1].wait_for", (1,))]


def test_error_of_a_rank_is_an_event(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    workers = mesh.spawn("workers", Worker)
    with pytest.raises(ActorError):
        workers.slice(gpus=1).fail.call().get(30)
    answers = [entry.event for entry in mesh.events() if type(entry.event) is CallAnswered]
    assert [(answer.ranks, answer.error) for answer in answers] == [((1,), "ValueError: bad sample 17")]
    assert not answers[0].stopped


def test_call_names_the_death_of_a_rank(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(2)
    workers = mesh.spawn("workers", Worker)
    pid = workers.pid.call().get(30)[1]
    call = workers.wait_for.call(str(tmp_path / "never"))
    assert wait_until(lambda: [rank.state for rank in state_of(mesh).ranks] == [RankState.RUNNING] * 2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MonarchError):
        call.get(30)
    last = list(state_of(mesh).calls.values())[-1]
    assert last.errors == {1: "was killed by signal 9 (SIGKILL)"} and 1 not in last.stopped


def test_call_has_the_title_of_its_caller(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers = mesh.spawn("workers", Worker)
    token = calling.set(("cell [3]", 3))
    try:
        workers.pid.call().get(30)
    finally:
        calling.reset(token)
    started = [entry.event for entry in mesh.events() if type(entry.event) is CallStarted]
    assert [(event.title, event.cell) for event in started] == [("cell [3]", 3)]


def test_quick_calls_are_counted_beyond_a_few(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers = mesh.spawn("workers", Worker)
    for _ in range(300):
        workers.pid.call().get(30)
    model = state_of(mesh)
    assert len(calls_of(mesh)) + model.skipped == 300 and model.skipped
    # Those that are listed have ended.
    assert not [call for call in model.calls.values() if call.left]


def test_pending_call_is_written_behind_many_quick_ones(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(1)
    workers = mesh.spawn("workers", Worker)
    token = calling.set(("cell [4]", 4))
    go = tmp_path / "go"
    try:
        for _ in range(3 * LISTED):
            workers.pid.call().get(30)
        begun = time.time()
        call = workers.wait_for.call(str(go))
    finally:
        calling.reset(token)
    model = state_of(mesh)
    last = list(model.calls.values())[-1]
    assert last.left and (last.title, last.cell) == ("cell [4]", 4) and last.started >= begun
    assert len(calls_of(mesh)) + model.skipped == 3 * LISTED + 1
    go.touch()
    call.get(30)
    assert wait_until(lambda: not list(state_of(mesh).calls.values())[-1].left)


def test_call_that_is_first_counted_and_then_written_counts_once() -> None:
    events: list[Any] = []
    lives: Any = {"m": SimpleNamespace(log=SimpleNamespace(add=lambda event, when=0.0: events.append(event)))}
    ports = PortTable()
    calls = ProcessCalls(lives, ports)
    calls._room = 0
    late, quick = NotedCall(), NotedCall()
    ports.open_call(late)
    # Its sender is between the two steps of noting it.
    calls._passed.append(late.targets)
    calls.look([])
    late.title, late.sent_at = ("", 0), 1.0
    calls.look([])
    calls._room = 0
    calls.sent(quick)
    calls.look([])
    assert [type(event) for event in events] == [CallsSkipped, CallStarted]


def test_death_and_replacement_are_events(procs: Callable[..., Any]) -> None:
    mesh = procs(2, name="mesh")
    workers = mesh.spawn("workers", Worker)
    pid = workers.pid.call().get(30)[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: state_of(mesh).ranks[1].state is RankState.FAILED)
    assert state_of(mesh).ranks[1].reason == "was killed by signal 9 (SIGKILL)"
    heal_mesh(mesh)
    assert wait_until(lambda: state_of(mesh).ranks[1].state is RankState.RESTARTED)
    rank = state_of(mesh).ranks[1]
    assert (rank.restarts, rank.reason) == (1, "") and rank.pid != pid
    workers.pid.call().get(30)
    assert wait_until(lambda: state_of(mesh).ranks[1].state is RankState.IDLE)


def test_silence_is_an_event(procs: Callable[..., Any]) -> None:
    mesh = procs(1, silence=0.5)
    workers = mesh.spawn("workers", Worker)
    pid = workers.pid.call_one().get(30)
    os.kill(pid, signal.SIGSTOP)
    waiting = workers.pid.call_one()
    try:
        assert wait_until(lambda: state_of(mesh).ranks[0].state is RankState.UNRESPONSIVE)
        assert "has not answered" in state_of(mesh).ranks[0].reason
    finally:
        os.kill(pid, signal.SIGCONT)
    waiting.get(30)
    assert wait_until(lambda: state_of(mesh).ranks[0].state is RankState.IDLE)
    assert state_of(mesh).ranks[0].reason == ""


def test_resize_is_an_event(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    mesh.resize(gpus=3)
    model = state_of(mesh)
    assert (model.sizes, [rank.state for rank in model.ranks]) == ((3,), [RankState.IDLE] * 3)
    mesh.resize(gpus=1)
    assert len(state_of(mesh).ranks) == 1


def test_events_of_a_slice_are_those_of_its_ranks(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    workers = mesh.spawn("workers", Worker)
    workers.slice(gpus=1).pid.call().get(30)
    workers.slice(gpus=2).pid.call().get(30)
    for view in (mesh.slice(gpus=1), workers.slice(gpus=1)):
        assert [entry.event.ranks for entry in view.events().of_kind("call started")] == [(1,)]
    with pytest.raises(ArgumentError, match=r"expected one of call answered, .*, got 'call'"):
        mesh.events().of_kind("call")


def test_state_is_that_of_the_log(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    workers = mesh.spawn("workers", Worker)
    workers.pid.call().get(30)
    log = telemetry_of(mesh)
    model, again = log.model(), log.base()
    for entry in log.since(0):
        if entry.number <= model.number:
            fold(again, entry)
    assert again == model


def test_subscriber_is_called_after_changes_without_a_lock(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    log = telemetry_of(mesh)
    told: list[tuple[int, str]] = []

    def changed() -> None:
        # Other threads can use the log meanwhile.
        other = threading.Thread(target=log.model)
        other.start()
        other.join(20)
        told.append((log.number, threading.current_thread().name))

    end = log.subscribe(changed)
    mesh.spawn("workers", Worker).pid.call().get(30)
    number = log.model().number
    assert wait_until(lambda: told and told[-1][0] >= number)
    assert all(name.startswith("monarch-events-") for _, name in told)
    end()


def test_mesh_from_elsewhere_has_no_events(host: Any) -> None:
    from monarch.actor import this_proc

    with pytest.raises(MonarchError, match="has no events here"):
        this_proc().events()


def test_table_is_readable_and_converts(procs: Callable[..., Any]) -> None:
    arrow = pytest.importorskip("pyarrow")
    mesh = procs(1, name="mesh")
    mesh.initialized.get(30)
    table = mesh.events()
    assert repr(table).startswith(f"{len(table)} events of mesh\n") and "mesh started" in repr(table)
    assert "<table" in table._repr_html_()
    columns = table.to_arrow()
    assert isinstance(columns, arrow.Table) and columns.num_rows == len(table)
    assert columns["kind"][0].as_py() == "mesh started" and columns["rank"][0].as_py() is None
    entry: Entry = table[0]
    assert entry.number == 1 and len(table[:1]) == 1


def test_missing_library_is_named(procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    mesh = procs(1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MonarchError, match=r"to_pandas\(\) needs pandas, .* pip install pandas"):
        mesh.events().to_pandas()


def test_start_of_ranks_is_progress(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    mesh.initialized.get(30)
    bar = state_of(mesh).bars["start"]
    assert (bar.done, bar.total, bar.ended, bar.unit) == ({-1: 3}, {-1: 3}, {-1}, "ranks")
    assert bar.ranks == (), "all"


def test_heal_is_progress(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    pids = mesh.spawn("workers", Worker).pid.call().get(30)
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: state_of(mesh).ranks[1].state is RankState.FAILED)
    heal_mesh(mesh)
    bar = state_of(mesh).bars["heal"]
    assert (bar.done, bar.total, bar.ended, bar.ranks) == ({-1: 1}, {-1: 1}, {-1}, (1,))


class Holder(Actor):
    def __init__(self) -> None:
        import torch

        self.weight = torch.ones(4)

    @endpoint
    def state(self) -> dict[str, Any]:
        return {"weight": self.weight}


def test_copies_and_checkpoints_are_progress(procs: Callable[..., Any], tmp_path: Any) -> None:
    from monarch import checkpoint
    from monarch.distributed import copy_state

    mesh = procs(2)
    holders: Any = mesh.spawn("holders", Holder)
    copy_state(holders.slice(gpus=0).state, holders.state).get(30)
    bar = state_of(mesh).bars["copy_state"]
    assert bar.ended == {-1} and bar.done == bar.total
    checkpoint(holders, str(tmp_path / "checkpoint"), state="state").get(30)
    bar = state_of(mesh).bars["checkpoint"]
    assert bar.ended == {-1} and bar.done == bar.total == {-1: 5}
