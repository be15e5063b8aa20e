"""Processes: their environment, bootstrap, cores and threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._node.current import current_node
from monarch._session.session import need_session
from monarch.actor import Actor, Point, Role, default_bootstrap_cmd, endpoint, proc_mesh, this_host, this_proc
from monarch.exceptions import ActorError, ArgumentError, CallTimeoutError, MonarchError, ShapeError, SpawnError

CORES = sorted(os.sched_getaffinity(0))


class Looks(Actor):
    @endpoint
    def env(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @endpoint
    def child_env(self, name: str) -> str:
        import subprocess

        return subprocess.run(["printenv", name], capture_output=True, text=True).stdout.strip()

    @endpoint
    def run(self, code: str) -> Any:
        return eval(code, {})

    @endpoint
    def cores(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    @endpoint
    def torch_threads(self) -> tuple[int, str | None]:
        import torch

        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    @endpoint
    def modules(self) -> list[str]:
        return [name for name in ("IPython", "ipykernel", "jupyterlab", "notebook") if name in sys.modules]


def test_env_is_in_place_and_none_removes(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_GOES", "here")
    mesh = procs(2, env={"MK_A": "x", "MK_NUMBER": 3, "HOME": None, "MK_UNICODE": "größe"})
    looks = mesh.spawn("looks", Looks)
    for seen in looks.env.call("MK_A", "MK_NUMBER", "HOME", "MK_UNICODE", "MK_GOES").get(timeout=20).values():
        assert seen == ["x", "3", None, "größe", "here"]
    assert looks.child_env.call("MK_A").get(timeout=20)[0] == "x"
    assert looks.child_env.call("HOME").get(timeout=20)[1] == ""
    monkeypatch.delenv("MK_GOES")
    assert procs(1).spawn("looks", Looks).env.call_one("MK_GOES").get(timeout=20) == [None]


def test_env_of_one_mesh_is_not_that_of_another(procs: Any) -> None:
    with_it, without = procs(1, env={"MK_B": "1"}), procs(1)
    assert with_it.spawn("a", Looks).env.call_one("MK_B").get(timeout=20) == ["1"]
    assert without.spawn("b", Looks).env.call_one("MK_B").get(timeout=20) == [None]


def test_bootstrap_command_sets_env(procs: Any) -> None:
    command = default_bootstrap_cmd().with_env({"MK_C": "command", "MK_D": "command"})
    mesh = procs(1, bootstrap_command=command, env={"MK_D": "given"})
    assert mesh.spawn("a", Looks).env.call_one("MK_C", "MK_D").get(timeout=20) == ["command", "given"]


def test_bootstrap_command_may_differ_by_process(procs: Any) -> None:
    def command(point: Point) -> Any:
        return default_bootstrap_cmd().with_env({"MK_C": str(point["gpus"]), "MK_D": "command"})

    role = Role(1, env={"MK_C": "of the role"})
    mesh = procs(3, bootstrap_command=command, env={"MK_D": "given"}, roles={"most": Role(2), "last": role})
    found = mesh.spawn("a", Looks).env.call("MK_C", "MK_D").get(timeout=20).values()
    assert found == [["0", "given"], ["1", "given"], ["of the role", "given"]]


@pytest.mark.parametrize("command", [3, lambda point: None, lambda point: {"env": {}}])
def test_invalid_bootstrap_command_is_refused(host: Any, command: Any) -> None:
    with pytest.raises(ArgumentError, match="pass a function to run first as bootstrap="):
        host.spawn_procs(bootstrap_command=command)


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A": object()}, {3: "x"}, {"A\0": "x"}])
def test_invalid_env_is_refused(host: Any, env: Any) -> None:
    with pytest.raises(ValueError):
        host.spawn_procs(env=env)


def test_bootstrap_runs_before_any_actor(procs: Any) -> None:
    def setup() -> None:
        os.environ["MK_SETUP"] = "done"

    async def setup_async() -> None:
        import asyncio

        await asyncio.sleep(0)
        os.environ["MK_SETUP"] = "done too"

    mesh = procs(2, bootstrap=setup)
    assert mesh.initialized.get(timeout=20) is True
    assert mesh.spawn("a", Looks).env.call("MK_SETUP").get(timeout=20)[1] == ["done"]
    other = procs(1, bootstrap=setup_async)
    assert other.spawn("a", Looks).env.call_one("MK_SETUP").get(timeout=20) == ["done too"]


@pytest.mark.parametrize("is_async", [False, True])
def test_bootstrap_may_wait_for_actors_that_it_makes(procs: Any, is_async: bool) -> None:
    def setup() -> None:
        first, second = (this_proc().spawn(name, Looks) for name in "ab")
        assert first.run.call_one("6 * 7").get() == second.run.call_one("42").get()
        os.environ["MK_SETUP"] = "asked"

    async def setup_async() -> None:
        assert await this_proc().spawn("a", Looks).run.call_one("6 * 7") == 42
        os.environ["MK_SETUP"] = "asked"

    mesh = procs(1, bootstrap=setup_async if is_async else setup)
    # The main thread is still for the first actor of the program.
    looks = mesh.spawn("looks", Looks)
    assert looks.env.call_one("MK_SETUP").get(timeout=20) == ["asked"]
    main = "__import__('threading').current_thread() is __import__('threading').main_thread()"
    assert looks.run.call_one(main).get(timeout=20)


def test_initialized_raises_the_bootstrap_error(procs: Any) -> None:
    def setup() -> None:
        raise OSError("no such disk")

    mesh = procs(2, bootstrap=setup)
    with pytest.raises(ActorError, match="OSError: no such disk") as caught:
        mesh.initialized.get(timeout=20)
    assert "test_procs.py" in str(caught.value) and sorted(caught.value.failures) == [0, 1]


def test_invalid_shapes_are_refused(host: Any) -> None:
    for per_host in ({"gpus": 0}, {"gpus": -1}, {"gpus": 1.5}, {"gpus": True}, {"gpus": "2"}):
        with pytest.raises(ValueError, match="gpus"):
            host.spawn_procs(per_host=per_host)
    with pytest.raises(ShapeError, match="this host only"):
        proc_mesh(gpus=1, hosts=2)


def test_cores_are_split_among_ranks(procs: Any) -> None:
    each = procs(len(CORES)).spawn("a", Looks).cores.call().get(timeout=20)
    assert sorted(core for cores in each.values() for core in cores) == CORES
    whole = procs(1).spawn("a", Looks)
    assert whole.cores.call_one().get(timeout=20) == CORES
    many = procs(len(CORES) + 1).spawn("a", Looks)
    assert set(many.torch_threads.call().get(timeout=20).values()) == {(1, "1")}
    assert whole.torch_threads.call_one().get(timeout=20) == (len(CORES), str(len(CORES)))


def test_user_setting_of_threads_wins(procs: Any) -> None:
    mesh = procs(2, env={"OMP_NUM_THREADS": "3"})
    assert mesh.spawn("a", Looks).torch_threads.call().get(timeout=20)[0] == (3, "3")


def test_user_setting_of_cores_wins(procs: Any, host: Any) -> None:
    mesh = procs(2, proc_bind=[[CORES[0]], {"cpus": str(CORES[-1])}])
    cores = mesh.spawn("a", Looks).cores.call().get(timeout=20)
    assert list(cores.values()) == [[CORES[0]], [CORES[-1]]]
    with pytest.raises(ShapeError, match=r"expected 2 entries, .* got 1"):
        host.spawn_procs({"gpus": 2}, proc_bind=[[0]])
    with pytest.raises(ValueError, match="9999"):
        host.spawn_procs({"gpus": 1}, proc_bind=[[9999]])


def test_ranks_have_no_jupyter(procs: Any) -> None:
    assert procs(1).spawn("a", Looks).modules.call_one().get(timeout=20) == []


def test_bootstrap_that_exits_raises(procs: Any) -> None:
    mesh = procs(2, bootstrap=lambda: os._exit(3))
    with pytest.raises(Exception, match="exited with code 3"):
        mesh.initialized.get(timeout=20)
    assert issubclass(SpawnError, RuntimeError) and issubclass(ArgumentError, TypeError)


def test_proc_mesh_can_be_awaited(host: Any) -> None:
    import asyncio

    async def main() -> list[str | None]:
        async with await proc_mesh(gpus=2, env={"MASTER_PORT": 12455}) as mesh:
            assert mesh.sizes == {"gpus": 2}
            looks = await mesh.spawn("looks", Looks)
            return (await looks.env.call("MASTER_PORT"))[1]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == ["12455"]


@pytest.mark.slow
def test_startup_variable_of_python_takes_effect(program: Any) -> None:
    out = program(
        """
from monarch.actor import Actor, endpoint, shutdown_context, this_host

class Hashes(Actor):
    @endpoint
    def of(self, text):
        return hash(text)

def fixed(seed):
    with this_host().spawn_procs(per_host={"gpus": 2}, env={"PYTHONHASHSEED": seed}) as mesh:
        values = list(mesh.spawn("hashes", Hashes).of.call("a text").get(timeout=50).values())
        assert values[0] == values[1]
        return values[0]

if __name__ == "__main__":
    print(fixed("7") == fixed("7"), fixed("7") == fixed("8"))
    shutdown_context().get(timeout=20)
"""
    ).ok()
    assert out.split() == ["True", "False"]


def test_this_host_is_one_host_without_axes() -> None:
    assert this_host().sizes == {} and len(this_host()) == 1
    assert this_host().initialized.get(timeout=20) is True


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The failures that the fault hook of the program got."""
    told: list[Any] = []
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", told.append)
    return told


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_actors_of_a_failed_bootstrap_fail_with_its_error(
    procs: Any, hooked: list[Any], error: type[BaseException]
) -> None:
    def setup() -> None:
        raise error("no such disk")

    mesh = procs(2, bootstrap=setup)
    first, second = mesh.spawn("first", Looks), mesh.spawn("second", Looks)
    for actors in (first, second):
        with pytest.raises(MonarchError, match=rf"bootstrap raised {error.__name__}: no such disk"):
            actors.cores.call().get(timeout=20)
        with pytest.raises(MonarchError, match=rf"bootstrap raised {error.__name__}: no such disk"):
            actors.initialized.get(timeout=20)
    assert not hooked


def test_bootstrap_error_is_read_once_for_all_actors(procs: Any, hooked: list[Any]) -> None:
    def setup() -> None:
        raise OSError("no such disk")

    mesh = procs(2, bootstrap=setup)
    first, _second = mesh.spawn("first", Looks), mesh.spawn("second", Looks)
    with pytest.raises(MonarchError, match="no such disk"):
        first.initialized.get(timeout=20)
    # Twice the usual time after which an unread error reaches the hook.
    assert not wait_until(lambda: hooked, 0.6)


def test_error_read_before_its_report_does_not_reach_the_hook(procs: Any, hooked: list[Any]) -> None:
    def setup() -> None:
        raise OSError("no such disk")

    node, gate = current_node(), threading.Event()

    def hold() -> None:
        gate.wait(60)

    faults = need_session(node)._faults
    # Faults are reported in this lane, one after another.
    node.lanes.post("faults", hold)
    mesh = procs(1, bootstrap=setup)
    actors = mesh.spawn("actors", Looks)
    try:
        assert wait_until(lambda: faults._failed)
        with pytest.raises(MonarchError, match="no such disk"):
            actors.initialized.get(timeout=20)
    finally:
        gate.set()
    done = threading.Event()
    assert wait_until(lambda: not faults._failed)
    node.lanes.post("faults", done.set)
    assert done.wait(20) and not hooked


@pytest.mark.parametrize("spawns", [False, True])
def test_unawaited_bootstrap_error_reaches_the_hook(procs: Any, hooked: list[Any], spawns: bool) -> None:
    def setup() -> None:
        raise OSError("no such disk")

    mesh = procs(2, name="disks", bootstrap=setup)
    actors = mesh.spawn("looks", Looks) if spawns else None
    assert wait_until(lambda: hooked)
    assert "bootstrap raised OSError: no such disk" in hooked[0].text and hooked[0].ranks == (0, 1)
    assert hooked[0].mesh_name == ("looks" if actors is not None else "disks")


def test_second_actor_is_made_after_the_bootstrap(procs: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def setup() -> None:
        while not gate.exists():
            time.sleep(0.01)
        os.environ["MK_SETUP"] = "done"

    class Sees(Actor):
        def __init__(self) -> None:
            self.seen = os.environ.get("MK_SETUP")

        @endpoint
        def what(self) -> str | None:
            return self.seen

    mesh = procs(1, bootstrap=setup)
    first, second = mesh.spawn("first", Sees), mesh.spawn("second", Sees)
    with pytest.raises(CallTimeoutError):
        second.initialized.get(timeout=0.5)
    gate.touch()
    assert [each.what.call_one().get(timeout=20) for each in (first, second)] == ["done", "done"]


class Draws(Actor):
    @endpoint
    def draw(self) -> tuple[int, float, float]:
        import random

        import torch

        return torch.initial_seed(), torch.rand(()).item(), random.random()


def test_each_rank_draws_random_numbers_of_its_own(procs: Any) -> None:
    """As in processes that torchrun starts; code that wants equal ones sets a seed."""
    drawn = [values for _ in range(2) for values in procs(3).spawn("draws", Draws).draw.call().get(60).values()]
    assert all(len(set(column)) == 6 for column in zip(*drawn, strict=True)), drawn
