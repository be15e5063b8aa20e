"""Meshes that resize, restart dead ranks automatically, keep spares, and have roles."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from leaks import wait_until
from meshes import known_dead, values
from monarch._meshes.procs.resize import resize
from monarch._node.future import in_thread, to_its_end
from monarch.actor import Actor, MeshFailure, Restart, Role, context, current_rank, endpoint, heal_mesh, supervise
from monarch.exceptions import (
    ActorError,
    ArgumentError,
    AxisError,
    CallTimeoutError,
    DeviceMeshError,
    ShapeError,
    StoppedError,
    SupervisionError,
)


class Member(Actor):
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.resizes: list[tuple[dict[str, int], dict[str, int]]] = []

    def __resized__(self, old: dict[str, int], new: dict[str, int]) -> None:
        self.resizes.append((old, new))

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def fail(self) -> None:
        raise RuntimeError("on purpose")

    @endpoint
    def who(self) -> tuple[int, int, int, int]:
        identity = context().actor_instance.rank
        return current_rank().rank, identity.rank, identity.extent.nelements, os.getpid()

    @endpoint
    def told(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        return self.resizes

    @endpoint
    def total(self) -> float:
        import torch
        import torch.distributed as dist

        from monarch.distributed import group

        here = torch.tensor([float(current_rank().rank + 1)])
        dist.all_reduce(here, group=group())
        return here.item()

    @endpoint
    def total_after(self, gate: str) -> float:
        assert wait_until(lambda: os.path.exists(gate))
        return Member.total.method(self)

    @endpoint
    def ask(self, other: Any) -> int:
        """Return the number of answers through a reference that this actor keeps."""
        self.other = other if other is not None else self.other
        return len(self.other.who.call().get(20))

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Picky(Actor):
    def __init__(self) -> None:
        if context().actor_instance.rank.rank > 2:
            raise RuntimeError("no more than three")


class Gated(Member):
    """On later ranks the constructor waits for a file."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        Path(f"{gate}.{current_rank().rank}").touch()
        while current_rank().rank > 1 and not os.path.exists(gate):
            time.sleep(0.005)


class GatedWithoutHook(Actor):
    """The same, and a resize does not wait for its earlier calls."""

    def __init__(self, gate: str) -> None:
        Path(f"{gate}.{current_rank().rank}").touch()
        while current_rank().rank > 1 and not os.path.exists(gate):
            time.sleep(0.005)

    @endpoint
    def add(self) -> int:
        return 1


class Booted(Actor):
    @endpoint
    def when(self) -> str:
        return os.environ["BOOTED"]


def boot() -> None:
    os.environ["BOOTED"] = str(os.getpid())


def pid_of(members: Any, rank: int) -> int:
    return members.slice(gpus=rank).who.call_one().get(30)[3]


def test_a_mesh_grows_and_shrinks(procs: Callable[..., Any]) -> None:
    mesh = procs(2, name="mesh")
    members, part = mesh.spawn("members", Member, 10), mesh.slice(gpus=slice(0, 1)).spawn("part", Member)
    first = mesh.slice(gpus=0)
    assert values(members.add.call()) == [11, 11] and values(members.total.call()) == [3.0, 3.0]
    assert values(part.ask.call(members)) == [2]
    assert mesh.resize(gpus=4) is mesh
    assert mesh.sizes == members.sizes == {"gpus": 4} and len(part) == 1 and len(first) == 1
    # Those that were there keep everything; new ones are as the others were at first.
    assert values(members.add.call()) == [12, 12, 11, 11]
    assert [each[:3] for each in values(members.who.call())] == [(rank, rank, 4) for rank in range(4)]
    assert values(members.total.call()) == [10.0] * 4
    assert values(part.ask.call(members)) == [4]
    assert values(members.told.call()) == [[({"gpus": 2}, {"gpus": 4})]] * 2 + [[]] * 2
    last = members.slice(gpus=3)
    pids = [each[3] for each in values(members.who.call())]
    assert mesh.resize(gpus=1) is mesh
    assert values(members.add.call()) == [13] and values(members.total.call()) == [1.0]
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids[1:]))
    with pytest.raises(StoppedError, match=r"rank 3 of members left when the mesh was resized to gpus=1"):
        last.add.call()
    # What has gone does not come back under its old name.
    mesh.resize(gpus=4)
    assert values(members.add.call()) == [14, 11, 11, 11]
    assert not {each[3] for each in values(members.who.call())} & set(pids[1:])
    assert values(last.add.call()) == [12]


def test_resize_waits_for_calls_that_need_a_group(procs: Callable[..., Any], tmp_path: Path) -> None:
    mesh, gate = procs(2), tmp_path / "gate"
    members = mesh.spawn("members", Member)
    early = members.total_after.call(str(gate))
    with pytest.raises(CallTimeoutError, match=r"was not resized: an earlier call of members did not finish"):
        resize(mesh, None, {"gpus": 3}, 0.1)
    # It is as it was: a group made now has two ranks.
    assert mesh.sizes == {"gpus": 2}
    resized = in_thread(mesh._node, "resize", lambda: mesh.resize(gpus=3))
    gate.touch()
    assert values(early) == [3.0, 3.0] and resized.get(30).sizes == {"gpus": 3}
    assert values(members.total.call()) == [6.0] * 3


def test_first_of_two_axes_resizes(procs: Callable[..., Any]) -> None:
    mesh = procs({"dp": 2, "tp": 2})
    members = mesh.spawn("members", Member)
    mesh.resize(dp=3)
    assert mesh.sizes == {"dp": 3, "tp": 2} and [each[1] for each in values(members.who.call())] == list(range(6))
    assert values(members.total.call()) == [21.0] * 6
    with pytest.raises(ShapeError, match=r"only the first axis .* 'dp'; changing 'tp' would renumber"):
        mesh.resize(tp=1)


def test_a_grown_rank_dies_and_is_healed(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    members = mesh.spawn("members", Member)
    mesh.resize(gpus=3)
    values(members.add.call())
    os.kill(pid_of(members, 2), signal.SIGKILL)
    assert wait_until(lambda: known_dead(mesh, 2))
    with pytest.raises(DeviceMeshError, match=r"dead ranks \(rank 2\); call heal_mesh before"):
        mesh.resize(gpus=4)
    heal_mesh(mesh)
    assert values(members.add.call()) == [2, 2, 1]
    mesh.resize(gpus=4)
    assert values(members.add.call()) == [3, 3, 2, 1]


def test_invalid_resizes_are_refused(procs: Callable[..., Any]) -> None:
    mesh = procs(3, name="mesh")
    picky = mesh.spawn("picky", Picky)
    picky.initialized.get(30)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ShapeError, match=r"resize\(gpus=\.\.\.\): expected a number of at least 1"):
            mesh.resize(gpus=wrong)
    with pytest.raises(AxisError):
        mesh.resize(hosts=2)
    with pytest.raises(StoppedError, match="cannot resize a slice or a received reference of mesh"):
        mesh.slice(gpus=0).resize(gpus=2)
    with pytest.raises(ActorError, match="no more than three"):
        mesh.resize(gpus=4)
    mesh.stop().get(30)
    with pytest.raises(StoppedError, match="was stopped, so it cannot be resized"):
        mesh.resize(gpus=2)


def test_calls_of_a_supervisor_skip_its_verdict(procs: Callable[..., Any]) -> None:
    """Threads of the supervisor skip it too, for example a heal that meets another dead rank."""
    mesh = procs(3, name="mesh")
    members = mesh.spawn("members", Member)
    pids = [each[3] for each in values(members.who.call())]
    met: list[Any] = []

    def meets_the_dead() -> BaseException | None:
        try:
            return members.slice(gpus=1).add.call_one().exception(20)
        except DeviceMeshError as error:
            return error

    def on_failure(failure: MeshFailure) -> bool:
        if not met:
            os.kill(pids[1], signal.SIGKILL)
            assert wait_until(lambda: known_dead(mesh, 1))
            met.append(in_thread(mesh._node, "work", meets_the_dead).get(30))
            met.append(to_its_end(mesh._node, "work", meets_the_dead))
        heal_mesh(mesh)
        return True

    with supervise(mesh, on_failure=on_failure):
        os.kill(pids[2], signal.SIGKILL)
        assert wait_until(lambda: len(met) == 2, 60)
        assert all(isinstance(each, SupervisionError) for each in met), met
        assert wait_until(lambda: not known_dead(mesh, 1) and not known_dead(mesh, 2))
        assert len(values(members.add.call())) == 3


@pytest.mark.parametrize("heals", [False, True])
def test_interrupted_change_continues(procs: Callable[..., Any], tmp_path: Path, heals: bool) -> None:
    gate = tmp_path / "gate"
    mesh = procs(2, name="mesh")
    members = mesh.spawn("gated", Gated, str(gate))
    if heals:
        gate.touch()
        mesh.resize(gpus=3)
        gate.unlink()
        os.kill(pid_of(members, 2), signal.SIGKILL)
        assert wait_until(lambda: known_dead(mesh, 2))
        (tmp_path / "gate.2").unlink()

    def interrupt() -> None:
        # During the change: the constructor of the new actor runs.
        assert wait_until((tmp_path / "gate.2").exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        heal_mesh(mesh) if heals else mesh.resize(gpus=3)
    thread.join()
    gate.touch()
    # The change continues, and a second request waits for its end.
    heal_mesh(mesh) if heals else mesh.resize(gpus=3)
    assert values(members.add.call()) == [1, 1, 1]
    assert values(members.told.call()) == [[({"gpus": 2}, {"gpus": 3})]] * 2 + [[]]


def test_interrupted_resize_does_not_follow_a_later_one(procs: Callable[..., Any], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    mesh = procs(2, name="mesh")
    members = mesh.spawn("gated", GatedWithoutHook, str(gate))

    def interrupted(size: int, begun: Callable[[], object]) -> None:
        def interrupt() -> None:
            assert wait_until(begun)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            mesh.resize(gpus=size)
        thread.join()

    interrupted(3, (tmp_path / "gate.2").exists)
    # It waits for the first one, which continues.
    interrupted(1, lambda: sum(each.name == "monarch-resize" for each in threading.enumerate()) == 2)
    gate.touch()
    assert mesh.resize(gpus=2).extent == {"gpus": 2}
    assert wait_until(lambda: not any(each.name == "monarch-resize" for each in threading.enumerate()))
    assert values(members.add.call()) == [1, 1] and mesh.extent == {"gpus": 2}


def test_dead_ranks_are_restarted(procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[MeshFailure] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", told.append)
    mesh = procs(2, name="mesh", restart=Restart(most=2, within=600.0, backoff=0.01))
    members = mesh.spawn("members", Member)
    for _ in range(2):
        os.kill(pid_of(members, 1), signal.SIGKILL)
        assert wait_until(lambda: known_dead(mesh, 1) or mesh._state.supervision.settling)
        # A call that comes meanwhile waits until the rank is there again.
        assert values(members.slice(gpus=1).add.call()) == [1]
    assert values(members.add.call()) == [1, 2] and not told
    os.kill(pid_of(members, 1), signal.SIGKILL)
    # Two were allowed.
    assert wait_until(lambda: bool(told))
    assert told[0].ranks == (1,) and mesh._state.restarts == 2
    with pytest.raises(DeviceMeshError):
        members.add.call().get(30)


def test_failed_actors_are_recreated(procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[MeshFailure] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", told.append)
    mesh = procs(2, name="mesh", restart=Restart(most=1, within=600.0, backoff=0.01))
    members = mesh.spawn("members", Member)
    pids = [each[3] for each in values(members.who.call())]
    values(members.add.call())
    members.slice(gpus=1).fail.broadcast()
    assert wait_until(lambda: mesh._state.restarts == 1)
    # In the same process, as it was at first; the others have kept what they had.
    assert values(members.add.call()) == [2, 1] and [each[3] for each in values(members.who.call())] == pids
    assert told == []
    members.slice(gpus=1).fail.broadcast()
    assert wait_until(lambda: bool(told))
    assert told[0].ranks == (1,) and "on purpose" in told[0].text


def test_failed_restart_goes_to_supervisors(procs: Callable[..., Any], tmp_path: Any) -> None:
    path = tmp_path / "once"
    mesh = procs(1, name="mesh", restart="on-failure")
    fragile = mesh.spawn("fragile", Once, str(path))
    with supervise(mesh) as watch:
        os.kill(fragile.pid.call_one().get(30), signal.SIGKILL)
        assert wait_until(lambda: bool(watch.failures))
        assert "could not be restarted" in watch.failures[0].reason and watch.failures[0].ranks == (0,)
    # Its process is there again, its actor is not.
    with pytest.raises((ActorError, DeviceMeshError), match="only once"):
        fragile.pid.call_one().get(30)


class Once(Actor):
    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            raise RuntimeError("only once")
        open(path, "w").close()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("wrong", ["always", 3, True])
def test_invalid_restart_rules_are_refused(procs: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="restart: expected"):
        procs(1, restart=wrong)


def test_spares_take_the_place_of_the_dead(procs: Callable[..., Any]) -> None:
    mesh = procs(2, name="mesh", spares=1, bootstrap=boot)
    booted, members = mesh.spawn("booted", Booted), mesh.spawn("members", Member)
    values(members.add.call())
    starting = mesh._state.starting
    for _ in range(2):
        (spare,) = starting.waiting()
        pid = pid_of(members, 0)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: known_dead(mesh, 0))
        heal_mesh(mesh)
        # It was there, and set up, before; another one waits now.
        assert mesh._state.procs.proc(0) == spare and starting.waiting() != [spare]
        rank, identity, size, new = members.slice(gpus=0).who.call_one().get(30)
        assert (rank, identity, size) == (0, 0, 2) and new != pid
        assert booted.slice(gpus=0).when.call_one().get(30) == str(new)
        assert values(members.total.call()) == [3.0, 3.0]
    assert values(members.add.call()) == [1, 2]
    # A spare that has died is not taken.
    (spare,) = starting.waiting()
    assert wait_until(lambda: spare in mesh._node.peers.pids)
    mesh._node.peers.to_agent(mesh._node.host, _signal(mesh, spare))
    assert wait_until(lambda: mesh._node.peers.get(spare).dead is not None)
    os.kill(pid_of(members, 1), signal.SIGKILL)
    assert wait_until(lambda: known_dead(mesh, 1))
    heal_mesh(mesh)
    assert values(members.add.call()) == [2, 1]


def _signal(mesh: Any, proc: str) -> Any:
    from monarch._wire import messages as m

    return m.Signal(mesh._node.proc, [proc], signal.SIGKILL)


def test_invalid_spares_are_refused(procs: Callable[..., Any]) -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(ArgumentError, match="spares: expected a number"):
            procs(1, spares=wrong)


def test_roles_differ_by_env_and_device(procs: Callable[..., Any]) -> None:
    mesh = procs({}, name="mesh", roles={"train": Role(2), "load": Role(1, device="cpu", env={"WHAT": "loads"})})
    members = mesh.spawn("members", Member)
    assert mesh.sizes == {"procs": 3}
    assert values(members.variable.call("WHAT")) == [None, None, "loads"]
    assert values(members.variable.call("CUDA_VISIBLE_DEVICES"))[2] == ""
    loaders, trainers = mesh.role("load").spawn("loaders", Member), mesh.role("train").spawn("trainers", Member)
    assert len(loaders) == 1 and len(trainers) == 2
    os.kill(loaders.who.call().get(30).item(procs=0)[3], signal.SIGKILL)
    assert wait_until(lambda: known_dead(mesh, 2))
    heal_mesh(mesh)
    assert values(members.variable.call("WHAT")) == [None, None, "loads"]
    with pytest.raises(ShapeError, match="has no role 'eval'; it has train, load"):
        mesh.role("eval")
    with pytest.raises(ShapeError, match="expected a Role of at least 1 rank"):
        procs({}, roles={"load": 3})
    with pytest.raises(ShapeError, match=r"3 ranks on each host.*per_host is"):
        procs(4, roles={"load": Role(3)})


def test_calls_wait_for_the_back_off(procs: Callable[..., Any]) -> None:
    mesh = procs(1, restart=Restart(most=1, within=600.0, backoff=0.4))
    members = mesh.spawn("members", Member)
    pid = pid_of(members, 0)
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: mesh._state.supervision.settling)
    assert values(members.add.call()) == [1]
    assert time.monotonic() - begun >= 0.4
