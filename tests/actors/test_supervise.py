"""Unsupervised failures fail all calls of their mesh; a supervisor decides about the others."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import monarch.actor
from leaks import wait_until
from monarch._actors import running
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node
from monarch.actor import Actor, MeshFailure, endpoint, heal_mesh, supervise, this_host
from monarch.exceptions import ActorError, ArgumentError, DeviceMeshError, StoppedError, SupervisionError


class Worker(Actor):
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.count = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self, path: str) -> str:
        """Wait until a file exists."""
        assert wait_until(lambda: os.path.exists(path), 60)
        return "done"

    @endpoint
    def end(self, code: int = 3) -> None:
        os._exit(code)

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def fail(self) -> None:
        raise ValueError("no good")


class Judge(Actor):
    """Owns a mesh, and records its failures."""

    def __init__(self, handles: bool) -> None:
        self.handles = handles
        self.told: list[tuple[tuple[int, ...], str]] = []

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append((failure.ranks, failure.reason))
        return self.handles

    @endpoint
    def begin(self, size: int) -> list[int]:
        self.workers: Any = this_host().spawn_procs({"gpus": size}).spawn("workers", Worker)
        return list(self.workers.pid.call().get().values())

    @endpoint
    def use(self) -> list[int]:
        return list(self.workers.slice(gpus=0).add.call().get(30).values())

    @endpoint
    def what(self) -> list[tuple[tuple[int, ...], str]]:
        return self.told


class AsyncJudge(Actor):
    def __init__(self) -> None:
        self.told: list[int] = []

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        self.told.extend(failure.ranks)
        return True

    @endpoint
    async def begin(self) -> list[int]:
        self.workers: Any = this_host().spawn_procs({"gpus": 3}).spawn("workers", Worker)
        return list((await self.workers.pid.call()).values())

    @endpoint
    async def what(self) -> list[int]:
        return sorted(self.told)


class BusyJudge(Judge):
    @endpoint
    def fail_worker(self) -> None:
        self.workers.fail.broadcast()

    @endpoint
    def fail_worker_until_stopped(self, path: str) -> None:
        """Return once both the failure and a stop wait for the end of this call."""
        self.path = path
        self.workers.fail.broadcast()
        mailbox: Any = running.current.get()[0]  # type: ignore[index]
        assert wait_until(lambda: mailbox.executor._urgent and mailbox.halting is not None, 30)

    def __cleanup__(self, exc: Exception | None) -> None:
        if hasattr(self, "path"):
            with open(self.path, "w") as file:
                file.write(str(len(self.told)))

    @endpoint
    def note(self) -> int:
        """Take a while until a failure is known; return the number of known ones."""
        if not self.told:
            time.sleep(0.02)
        return len(self.told)


class PatientJudge(Actor):
    """Its ``__supervise__`` does not end."""

    @endpoint
    async def begin(self) -> None:
        self.asked = asyncio.Event()
        self.workers: Any = this_host().spawn_procs({"gpus": 1}).spawn("workers", Worker)
        await self.workers.pid.call()
        self.workers.fail.broadcast()
        await self.asked.wait()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.asked.set()
        await asyncio.Event().wait()
        return True


class Deferring(Worker):
    """Leaves both hooks to its base."""

    def __supervise__(self, failure: MeshFailure) -> bool:
        return bool(super().__supervise__(failure))

    def __cleanup__(self, exc: Exception | None) -> None:
        super().__cleanup__(exc)

    @endpoint
    def begin(self) -> None:
        self.workers: Any = this_host().spawn_procs({"gpus": 1}).spawn("workers", Worker)
        self.workers.fail.broadcast()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """The failures that have reached the program."""
    found: list[MeshFailure] = []
    # A death at the end of the test before may be told in this one.
    earlier = set(meshes_of(current_node()).own_procs)

    def tell(failure: MeshFailure) -> None:
        if failure.mesh is None or failure.mesh._state.procs.uid not in earlier:
            found.append(failure)

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", tell)
    return found


def spawned(procs: Callable[..., Any], size: int = 3, **options: Any) -> tuple[Any, Any, list[int]]:
    mesh = procs(size, name="mesh", **options)
    workers = mesh.spawn("workers", Worker)
    return mesh, workers, list(workers.pid.call().get(30).values())


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_all_calls_fail_as_one(procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any) -> None:
    _, workers, pids = spawned(procs)
    path = str(tmp_path / "go")
    whole, other = workers.wait.call(path), workers.slice(gpus=slice(1, 3)).wait.call(path)
    streamed = list(workers.slice(gpus=2).wait.stream(path))
    before = time.time()
    kill(pids[0])
    with pytest.raises(SupervisionError, match=r"rank 0 of workers was killed by signal 9") as of_whole:
        whole.get(30)
    assert of_whole.value.ranks == (0,) and before <= of_whole.value.when <= time.time()
    for each in (other, streamed[0]):
        with pytest.raises(SupervisionError, match=r"rank 0 of mesh was killed by signal 9.*mesh has no supervisor"):
            each.get(30)
    error = other.exception()
    assert isinstance(error, SupervisionError) and error.reason.endswith("so all of its calls fail")
    # They have been told, so nobody else is; and those that live can be used.
    open(path, "w").close()
    assert list(workers.slice(gpus=slice(1, 3)).add.call().get(30).values()) == [1, 1]
    assert told == []


def test_living_ranks_are_usable_after_a_caught_death(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any
) -> None:
    workers = procs(4).spawn("workers", Worker)
    workers.add.call().get(20)
    for rank in (3, 1):
        path = tmp_path / f"go on {rank}"
        before = workers.slice(gpus=0).wait.call(str(path))
        with pytest.raises(SupervisionError, match="exited with code 3"):
            workers.slice(gpus=rank).end.call().get(20)
        after = workers.slice(gpus=slice(0, 4, 2) if rank == 1 else slice(0, 3)).wait.call(str(path))
        # The call that was under way fails, and then those that came after it are asked to end.
        with pytest.raises(SupervisionError, match="has no supervisor"):
            before.get(20)
        path.touch()
        assert set(after.get(20).values()) == {"done"}
    assert not told


def test_call_after_a_reported_failure_continues(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any
) -> None:
    """The call is made before the receiving thread has told all waiters, as by a thread that was told first."""
    workers, path = procs(3).spawn("workers", Worker), str(tmp_path / "go on")
    workers.add.call().get(20)
    after: list[Any] = []

    def go_on(proc: str) -> None:
        if not after:
            after.append(workers.slice(gpus=slice(0, 2)).wait.call(path))

    before = workers.slice(gpus=0).wait.call(path)
    current_node().events.proc_died.subscribe(go_on)
    with pytest.raises(SupervisionError, match="exited with code 3"):
        workers.slice(gpus=2).end.call().get(20)
    with pytest.raises(SupervisionError, match="has no supervisor"):
        before.get(20)
    open(path, "w").close()
    assert set(after[0].get(20).values()) == {"done"}
    assert not told


def test_a_death_that_no_call_waits_for_goes_up_once(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    _, _, pids = spawned(procs)
    before = time.time()
    kill(pids[1])
    kill(pids[2])
    # As one, unless the machine is so busy that one comes much later; each once in any case.
    assert wait_until(lambda: len([rank for failure in told for rank in failure.ranks]) == 2)
    assert sorted(rank for failure in told for rank in failure.ranks) == [1, 2]
    for failure in told:
        assert failure.mesh_name == "mesh" and "signal 9" in failure.reason
        assert before <= failure.when <= time.time() and failure.running == ()


def test_handled_failure_goes_no_further(procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any) -> None:
    mesh, workers, pids = spawned(procs)
    path = str(tmp_path / "go")
    with supervise(mesh) as watch:
        other, mine = workers.slice(gpus=slice(1, 3)).wait.call(path), workers.slice(gpus=0).wait.call(path)
        kill(pids[0])
        with pytest.raises(SupervisionError):
            mine.get(30)
        assert wait_until(lambda: bool(watch.failures))
        (failure,) = watch.failures
        assert failure.ranks == (0,) and failure.running == ("workers[gpus=0].wait()",) and failure.mesh == mesh
        # Calls to the others go on.
        assert not other.done
        open(path, "w").close()
        assert list(other.get(30).values()) == ["done", "done"]
    assert told == []


def test_mesh_healed_in_on_failure_stays_usable(procs: Callable[..., Any]) -> None:
    mesh, workers, pids = spawned(procs, 2)
    with supervise(mesh, lambda failure: heal_mesh(failure.mesh)) as watch:
        for _ in range(3):
            pids = list(workers.pid.call().get(30).values())
            kill(pids[1])
            with pytest.raises(SupervisionError):
                workers.slice(gpus=1).wait.call("/nowhere").get(30)
            # It waits for the end of what the supervisor does.
            assert list(workers.slice(gpus=1).add.call().get(30).values()) == [1]
    assert [failure.ranks for failure in watch.failures] == [(1,)] * 3


def test_inner_supervisors_come_first_once_per_rank(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    mesh, workers, pids = spawned(procs)
    asked: list[tuple[str, int]] = []

    def of(name: str, answer: bool) -> Callable[[MeshFailure], bool]:
        return lambda failure: asked.append((name, failure.ranks[0])) or answer

    async def slowly(failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        asked.append(("async", failure.ranks[0]))
        return failure.ranks != (2,)

    with supervise(mesh, of("outer", False)), supervise(workers.slice(gpus=slice(1, 3)), slowly):
        for pid in pids:
            kill(pid)
        assert wait_until(lambda: len([rank for failure in told for rank in failure.ranks]) == 2)
    assert sorted(asked) == [("async", 1), ("async", 2), ("outer", 0), ("outer", 2)]
    assert sorted(rank for failure in told for rank in failure.ranks) == [0, 2]


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, asyncio.CancelledError])
def test_a_supervisor_that_raises_handles_nothing(
    procs: Callable[..., Any], told: list[MeshFailure], capsys: pytest.CaptureFixture[str], kind: type[BaseException]
) -> None:
    mesh, workers, pids = spawned(procs, 2)

    def raises(failure: MeshFailure) -> None:
        raise kind

    with supervise(mesh, raises):
        kill(pids[0])
        assert wait_until(lambda: bool(told))
        with pytest.raises(SupervisionError):
            workers.add.call().get(30)
    assert "on_failure for mesh raised" in capsys.readouterr().err


def test_unawaited_actor_failures_reach_the_supervisor(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any
) -> None:
    mesh, workers, _ = spawned(procs)
    other = mesh.spawn("other", Worker)
    path = str(tmp_path / "go")
    with supervise(workers) as watch:
        workers.slice(gpus=0).fail.broadcast()
        assert wait_until(lambda: bool(watch.failures))
        assert watch.failures[0].ranks == (0,) and "no good" in watch.failures[0].text
        heal_mesh(workers)
        assert list(workers.add.call().get(30).values()) == [1, 1, 1]
    # Without a supervisor, all calls to these actors fail; those to others in the same processes do not.
    waiting, beside = workers.slice(gpus=2).wait.call(path), other.slice(gpus=1).wait.call(path)
    workers.slice(gpus=0).fail.broadcast()
    with pytest.raises(SupervisionError, match=r"rank 0 of workers: ValueError: no good; no supervisor handled it"):
        waiting.get(30)
    open(path, "w").close()
    assert list(beside.get(30).values()) == ["done"]
    assert told == []


@pytest.mark.parametrize("code", [0, 79])
def test_an_exit_of_the_program_is_no_stop_of_the_owner(
    procs: Callable[..., Any], told: list[MeshFailure], code: int
) -> None:
    mesh, workers, _ = spawned(procs, 2)
    with supervise(mesh) as watch:
        workers.slice(gpus=1).end.broadcast(code)
        assert wait_until(lambda: bool(watch.failures))
        assert watch.failures[0].ranks == (1,) and f"exited with code {code}" in watch.failures[0].reason
        with pytest.raises(SupervisionError, match=f"exited with code {code}") as caught:
            workers.slice(gpus=1).add.call_one().get(30)
        assert not isinstance(caught.value, StoppedError)
    assert told == []


@pytest.mark.parametrize("handles", [True, False])
def test_the_owning_actor_is_asked_once_for_each_rank(
    procs: Callable[..., Any], told: list[MeshFailure], handles: bool
) -> None:
    judge = procs(1).spawn("judge", Judge, handles)
    pids = judge.begin.call_one(3).get(30)
    kill(pids[1])
    kill(pids[2])
    assert wait_until(lambda: len(judge.what.call_one().get(30)) == 2) if handles else wait_until(lambda: bool(told))
    if handles:
        assert sorted(ranks for ranks, _ in judge.what.call_one().get(30)) == [(1,), (2,)]
        assert judge.use.call_one().get(30) == [1] and told == []
    else:
        assert "workers" in told[0].text or "procs" in told[0].text
        with pytest.raises((SupervisionError, ActorError)):
            judge.what.call_one().get(30)


def test_sync_owner_is_asked_before_messages_that_wait(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    judge = procs(1).spawn("judge", BusyJudge, True)
    judge.begin.call_one(1).get(30)
    judge.fail_worker.call_one().get(30)
    notes = [judge.note.call_one() for _ in range(150)]
    assert [note.get(30) for note in notes][-1] == 1
    assert told == []


def test_stopped_sync_owner_is_not_asked(procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any) -> None:
    judge = procs(1).spawn("judge", BusyJudge, True)
    judge.begin.call_one(1).get(30)
    call = judge.fail_worker_until_stopped.call_one(str(tmp_path / "told"))
    judge.stop().get(30)
    call.get(30)
    assert (tmp_path / "told").read_text() == "0" and told == []


def test_stop_cancels_a_pending_async_supervise(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    mesh = procs(1)
    judge = mesh.spawn("judge", PatientJudge)
    judge.begin.call_one().get(30)
    judge.stop().get(30)
    # What this failure would tell comes before what the next one tells.
    mesh.spawn("worker", Worker).fail.broadcast()
    assert wait_until(lambda: bool(told))
    assert [failure.mesh_name.partition("-")[0] for failure in told] == ["worker"]


def test_hooks_of_the_base_class_change_nothing(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    actor = procs(1).spawn("actor", Deferring)
    actor.begin.call_one().get(30)
    assert wait_until(lambda: bool(told))
    assert "no good" in told[0].text
    actor.stop().get(30)


def test_async_owner_supervises(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    judge = procs(1).spawn("judge", AsyncJudge)
    pids = judge.begin.call_one().get(30)
    kill(pids[0])
    kill(pids[2])
    assert wait_until(lambda: judge.what.call_one().get(30) == [0, 2])
    assert told == []


def test_invalid_arguments_of_supervise_are_refused(procs: Callable[..., Any]) -> None:
    mesh, workers, _ = spawned(procs, 1)
    with pytest.raises(ArgumentError, match="expected a mesh of processes or actors, got int"):
        supervise(3)
    with pytest.raises(ArgumentError, match="on_failure: expected a function"):
        supervise(workers, 3)  # pyright: ignore[reportArgumentType]
    mesh.stop().get(30)
    with pytest.raises(StoppedError, match="was stopped, so it cannot be supervised"):
        supervise(workers)


def test_supervise_works_in_async_code(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    mesh, workers, pids = spawned(procs, 2)

    async def work() -> int:
        async with supervise(mesh, heal_mesh_of) as watch:
            kill(pids[0])
            try:
                await workers.slice(gpus=0).wait.call("/nowhere")
            except DeviceMeshError:
                pass
        assert len(watch.failures) == 1
        return sum((await workers.add.call()).values())

    assert asyncio.run(work()) == 2
    assert told == []


async def heal_mesh_of(failure: MeshFailure) -> bool:
    await asyncio.to_thread(heal_in_thread, failure)
    return True


def heal_in_thread(failure: MeshFailure) -> None:
    heal_mesh(failure.mesh)
