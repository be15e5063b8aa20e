"""Reports of real ranks: their state, what they log, and their progress."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from leaks import wait_until
from monarch import log_metric, track
from monarch._core.telemetry.events import Collective, Metrics, Progress, RankReport, RankState
from monarch._node.current import current_node
from monarch._telemetry import sampler
from monarch.actor import Actor, endpoint
from monarch.exceptions import ArgumentError, MonarchError
from monarch.telemetry import state_of


class Worker(Actor):
    def __init__(self) -> None:
        self.model: Any = None
        self.average: Any = None
        self.batch: Any = None

    @endpoint
    def log(self, name: str, values: list[Any], step: int | None = None) -> None:
        for value in values:
            log_metric(name, value, step)

    @endpoint
    def log_many(self, count: int) -> None:
        for at in range(count):
            log_metric("loss", float(at))

    @endpoint
    def spin_until(self, path: str) -> None:
        while not os.path.exists(path):
            # As long as the line above, so that reports show both lines.
            os.path.exists(path)

    @endpoint
    def read(self, pipe: str) -> None:
        with open(pipe) as file:
            file.read()

    @endpoint
    def reduce_after(self, path: str) -> None:
        import torch
        import torch.distributed as dist

        from monarch.distributed import group

        while path and not os.path.exists(path):
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1), group=group())

    @endpoint
    def make(self) -> None:
        import torch

        self.model = torch.nn.Linear(1000, 100, bias=False)
        self.average = self.model.weight
        self.batch = torch.zeros(500)

    @endpoint
    def follow(self, count: int) -> None:
        for _ in track(range(count), "epoch"):
            pass

    @endpoint
    def break_reports(self, main: bool) -> int:
        """Let each report fail from now on; return how many failed."""
        if main:
            del sys.modules["__main__"]
            return 0
        looks: Any = current_node().output.watch.__self__  # pyright: ignore[reportFunctionMemberAccess]
        ticks: list[int] = []

        def fail() -> bool:
            ticks.append(len(ticks))
            raise LookupError(f"report {len(ticks)} fails on purpose")

        looks._steps = (fail, *looks._steps)
        while len(ticks) < 12:
            time.sleep(0.01)
        return len(ticks)

    @endpoint
    def fall(self) -> None:
        for at in track(range(10), "epoch"):
            if at == 3:
                raise ValueError("bad sample")


def workers_on(mesh: Any) -> Any:
    workers = mesh.spawn("workers", Worker)
    workers.log_many.call(0).get(30)
    return workers


def events(mesh: Any, kind: type) -> list[Any]:
    return [entry.event for entry in mesh.events() if type(entry.event) is kind]


def test_running_rank_reports_its_line(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(2)
    workers = workers_on(mesh)
    path = str(tmp_path / "go")
    call = workers.slice(gpus=1).spin_until.call(path)
    line = Worker.spin_until.method.__code__.co_firstlineno  # pyright: ignore
    places = {f"test_reports.py line {line + 2}", f"test_reports.py line {line + 4}"}
    assert wait_until(lambda: state_of(mesh).ranks[1].place in places)
    rank = state_of(mesh).ranks[1]
    assert rank.state is RankState.RUNNING and state_of(mesh).ranks[0].state is RankState.IDLE
    assert wait_until(lambda: state_of(mesh).ranks[1].usage.cpu > 0.1)
    assert rank.usage.rss > 10 << 20
    open(path, "w").close()
    call.get(30)
    assert wait_until(lambda: not state_of(mesh).ranks[1].place)
    assert wait_until(lambda: state_of(mesh).ranks[1].usage.cpu == 0)


def test_rank_in_a_c_call_is_blocked(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(1)
    workers = workers_on(mesh)
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    call = workers.read.call(pipe)
    assert wait_until(lambda: state_of(mesh).ranks[0].state is RankState.BLOCKED)
    assert "test_reports.py line" in state_of(mesh).ranks[0].place
    open(pipe, "w").close()
    call.get(30)
    assert wait_until(lambda: state_of(mesh).ranks[0].state is RankState.IDLE)


def test_rank_that_computes_is_not_blocked(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(1)
    workers = workers_on(mesh)
    path = str(tmp_path / "go")
    call = workers.spin_until.call(path)
    assert wait_until(lambda: len([1 for each in events(mesh, RankReport) if each.place]) >= 4)
    open(path, "w").close()
    call.get(30)
    assert RankState.BLOCKED not in {report.state for report in events(mesh, RankReport)}


def test_rank_that_waits_for_others_is_in_a_collective(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(2)
    workers = workers_on(mesh)
    path = str(tmp_path / "go")
    first = workers.slice(gpus=0).reduce_after.call("")
    second = workers.slice(gpus=1).reduce_after.call(path)
    assert wait_until(lambda: state_of(mesh).ranks[0].state is RankState.COLLECTIVE)
    found = state_of(mesh).ranks[0].collective
    assert found is not None and found.name == "all_reduce"
    assert state_of(mesh).ranks[1].state is not RankState.COLLECTIVE
    open(path, "w").close()
    first.get(30)
    second.get(30)
    assert wait_until(lambda: state_of(mesh).ranks[0].state is RankState.IDLE)
    assert state_of(mesh).ranks[0].collective is None


def test_collective_seen_late_began_at_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="waits")
    thread.start()
    # A wait inside backward() is known only from a thread that has not run between two looks.
    waits = Collective("", "0", 1)
    monkeypatch.setattr(sampler, "thread_of", lambda _: thread.ident)
    monkeypatch.setattr(sampler, "_collective", lambda frame, rank, ident, still: waits if still > 0 else None)
    looker, mailbox = sampler.Sampler(), cast("Any", object())
    look = looker.look(mailbox, 0)
    asked = look.since
    while look.state is not RankState.COLLECTIVE:
        time.sleep(0.5)
        asked, look = time.time(), looker.look(mailbox, 0)
    go.set()
    thread.join()
    assert look.since < asked and look.collective is waits


def test_time_without_running_is_forgotten_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="waits")
    thread.start()
    monkeypatch.setattr(sampler, "thread_of", lambda _: thread.ident)
    looker, mailbox = sampler.Sampler(), cast("Any", object())
    looker.look(mailbox, 0)
    assert thread.ident in sampler.still
    looker.look(None, 0)
    # A call that begins now is not taken for one that has waited since the last one.
    assert not sampler.still
    go.set()
    thread.join()


def test_tensors_are_counted_by_owner_once(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers_on(mesh).make.call().get(30)
    assert wait_until(lambda: state_of(mesh).ranks[0].tensors == {"model": 400_000, "batch": 2000})


def test_report_that_fails_each_time_is_told_once(procs: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    workers = workers_on(procs(1))
    assert workers.break_reports.call_one(False).get(30) >= 12
    shown: list[str] = []
    assert wait_until(lambda: shown.append(capfd.readouterr().err) or "10 times so far" in "".join(shown))
    text = "".join(shown)
    assert text.count("Traceback") == 1, text
    # Output and answers go on.
    assert workers.log_many.call_one(1).get(30) is None


def test_rank_without_main_module_reports(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(1)
    workers = workers_on(mesh)
    workers.break_reports.call(True).get(30)
    workers.make.call().get(30)
    assert wait_until(lambda: state_of(mesh).ranks[0].tensors == {"model": 400_000, "batch": 2000})


def test_metrics_arrive_before_the_answer(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    workers = workers_on(mesh)
    for at in range(20):
        workers.log.call("loss", [at / 2]).get(30)
        assert state_of(mesh).series["loss", 1].values[-1] == at / 2
    series = state_of(mesh).series["loss", 0]
    assert series.steps == list(range(20)) and series.values == [at / 2 for at in range(20)]


def test_no_metric_of_a_flood_is_lost(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    workers_on(mesh).log_many.call(200_000).get(60)
    for rank in range(2):
        logged = [event for event in events(mesh, Metrics) if event.rank == rank]
        assert [step for event in logged for step in event.steps] == list(range(200_000))
        assert [value for event in logged for value in event.values] == list(map(float, range(200_000)))
        assert len(logged) < 200


def test_metrics_take_numbers_of_all_kinds(procs: Callable[..., Any]) -> None:
    import numpy
    import torch

    mesh = procs(1)
    values = [1, True, 0.5, numpy.float32(0.25), numpy.int64(3), torch.tensor(2.0), torch.tensor([[7]]), math.nan]
    workers_on(mesh).log.call("x", values).get(30)
    found = state_of(mesh).series["x", 0].values
    assert found[:-1] == [1.0, 1.0, 0.5, 0.25, 3.0, 2.0, 7.0] and math.isnan(found[-1])


def test_steps_go_on_after_a_given_one(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers = workers_on(mesh)
    workers.log.call("x", [1.0], 10).get(30)
    workers.log.call("x", [2.0, 3.0]).get(30)
    assert state_of(mesh).series["x", 0].steps == [10, 11, 12]


def test_metrics_of_the_program_have_no_rank(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    log_metric("accuracy", 0.5, step=3)
    series = state_of(mesh).series["accuracy", -1]
    assert (series.steps, series.values) == ([3], [0.5])


def test_metrics_without_a_mesh_are_refused(program: Callable[..., Any]) -> None:
    text = """
        import monarch
        try:
            monarch.log_metric("loss", 1)
        except monarch.MonarchError as error:
            print(error)
        print(list(monarch.track([1, 2])))
    """
    import textwrap

    out = program(textwrap.dedent(text)).ok()
    assert "log_metric('loss'): no mesh is running" in out and "[1, 2]" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0.5, "loss"), "expected the name of a metric first"),
        (("", 0.5), "expected the name of a metric first"),
        (("loss", "high"), "expected a number or a tensor with one element, got str"),
        (("loss", [1.0]), "expected a number or a tensor with one element, got list"),
        (("loss", None), "expected a number or a tensor with one element, got NoneType"),
        (("loss", 1j), "expected a number or a tensor with one element, got complex"),
        (("loss", 0.5, "3"), "expected an int as step, got '3'"),
        (("loss", 0.5, True), "expected an int as step, got True"),
    ],
)
def test_wrong_metric_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ArgumentError, match=text.replace("(", r"\(")):
        log_metric(*arguments)


def test_tensor_of_many_elements_is_refused_as_metric() -> None:
    import torch

    with pytest.raises(ArgumentError, match=r"tensor of shape \(8,\); log its mean: value.mean\(\)"):
        log_metric("loss", torch.zeros(8))


def test_loss_with_gradient_is_a_metric_without_warning(procs: Callable[..., Any]) -> None:
    import torch

    mesh = procs(1)
    log_metric("loss", torch.ones(1, requires_grad=True).sum())
    assert state_of(mesh).series["loss", -1].values == [1.0]


def test_progress_of_ranks_is_one_bar(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    workers_on(mesh).follow.call(1000).get(30)
    bar = state_of(mesh).bars["epoch"]
    assert (bar.done, bar.total, bar.ended) == ({0: 1000, 1: 1000}, {0: 1000, 1: 1000}, {0, 1})
    assert len(events(mesh, Progress)) < 20


def test_bar_of_a_loop_that_raises_ends(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    assert workers_on(mesh).fall.call().exception(30) is not None
    assert wait_until(lambda: state_of(mesh).bars["epoch"].ended == {0})
    assert state_of(mesh).bars["epoch"].done == {0: 3}


def test_wrong_work_is_refused_before_the_loop() -> None:
    with pytest.raises(ArgumentError, match="track: expected an iterable, got int"):
        track(3)  # pyright: ignore
    with pytest.raises(ArgumentError, match="track: expected a number as total, got 'x'"):
        track([], total="x")  # pyright: ignore


def test_idle_rank_reports_nothing(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers_on(mesh)
    assert wait_until(lambda: events(mesh, RankReport))
    number = 0
    for _ in range(20):
        time.sleep(0.5)
        before, number = number, len(events(mesh, RankReport))
        if before == number:
            break
    time.sleep(1.0)
    assert len(events(mesh, RankReport)) == number


def test_metric_before_a_crash_is_kept(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers = workers_on(mesh)
    workers.log.call("loss", [1.0, 2.0]).get(30)
    with pytest.raises(MonarchError):
        workers.log.call("loss", ["x"]).get(30)
    assert state_of(mesh).series["loss", 0].values == [1.0, 2.0]


BESIDE_TRAINING = """
import sys, threading, time, torch
from torch import nn
from monarch._telemetry.tensors import bytes_by_owner
torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, end, sizes = torch.randn(4, 16), time.monotonic() + 8, set()
def look():
    while time.monotonic() < end:
        sizes.add(bytes_by_owner({"model": model, "optimizer": optimizer})["model"])
thread = threading.Thread(target=look)
thread.start()
while time.monotonic() < end:
    optimizer.zero_grad()
    model(x).sum().backward()
    model(x).sum().backward()
thread.join()
print(sizes)
"""


def test_sizes_are_looked_at_beside_a_backward_pass() -> None:
    """Gradients are replaced there without the GIL: reading them crashed the process."""
    done = subprocess.run([sys.executable, "-c", BESIDE_TRAINING], capture_output=True, text=True, timeout=90)
    assert done.stdout == f"{{{20 * (16 * 16 + 16) * 4}}}\n", done
