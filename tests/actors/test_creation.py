"""A constructor that raises reaches a waiting caller, or else the supervisors, the owner and the hook."""

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
from meshes import known_dead, values
from monarch._meshes.actors.creation import HEARD_S
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node
from monarch.actor import Actor, MeshFailure, Restart, current_rank, endpoint, heal_mesh, supervise, this_host
from monarch.exceptions import ActorError, DeviceMeshError, SupervisionError


class Picky(Actor):
    """Raises in its constructor unless a file exists."""

    def __init__(self, path: str = "/nowhere", bad: int = -1) -> None:
        if bad in (-1, current_rank().rank) and not os.path.exists(path):
            raise FileNotFoundError(2, "No such file", path)

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class FailsOnce(Actor):
    """Creates the missing file when it fails, so the next attempt succeeds."""

    def __init__(self, folder: str) -> None:
        path = f"{folder}/{current_rank().rank}"
        if not os.path.exists(path):
            open(path, "w").close()
            raise FileNotFoundError(2, "No such file", path)
        open(f"{path}.made", "w").close()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


class Waits(Actor):
    """On rank 0 the constructor raises; the other ranks wait for it."""

    def __init__(self, path: str) -> None:
        if current_rank().rank == 0:
            raise ValueError("rank 0 is not made")
        assert wait_until(lambda: os.path.exists(path), 60)

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


class Staggered(Actor):
    """The constructor raises at once on rank 0, and on other ranks when a file exists."""

    def __init__(self, path: str) -> None:
        rank = current_rank().rank
        assert rank == 0 or wait_until(lambda: os.path.exists(path), 60)
        raise ValueError("first" if rank == 0 else "later")


class InTurn(Actor):
    """The constructor of each rank raises when a file says so, unless another one exists."""

    def __init__(self, folder: str) -> None:
        rank = current_rank().rank
        if not os.path.exists(f"{folder}/mended {rank}"):
            assert wait_until(lambda: os.path.exists(f"{folder}/go {rank}"), 60)
            raise ValueError(f"rank {rank} is not made")

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


class LateOrNot(Actor):
    """The constructor of rank 0 raises unless a file exists, and that of rank 1 waits for one."""

    def __init__(self, folder: str) -> None:
        if current_rank().rank == 0 and not os.path.exists(f"{folder}/mended 0"):
            raise ValueError("rank 0 is not made")
        assert current_rank().rank == 0 or wait_until(lambda: os.path.exists(f"{folder}/go 1"), 60)

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


class Owner(Actor):
    """Owns actors whose constructors raise."""

    def __init__(self, handles: bool) -> None:
        self.handles, self.told = handles, list[tuple[str, tuple[int, ...], str]]()

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append((failure.mesh_name, failure.ranks, failure.reason))
        return self.handles

    @endpoint
    def begin(self) -> None:
        self.picky = this_host().spawn_procs({"gpus": 2}).spawn("picky", Picky)

    @endpoint
    def what(self) -> list[tuple[str, tuple[int, ...], str]]:
        return self.told


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """The faults of this test's meshes that have reached the program."""
    found: list[MeshFailure] = []
    earlier = set(meshes_of(current_node()).own_procs)

    def tell(failure: MeshFailure) -> None:
        if failure.mesh is None or failure.mesh._state.procs.uid not in earlier:
            found.append(failure)

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", tell)
    return found


def nothing_comes(told: list[MeshFailure]) -> bool:
    """Return whether no fault arrives within twice its usual time."""
    return not wait_until(lambda: bool(told), 2 * HEARD_S + 0.2)


def test_spawn_whose_constructors_raise_reaches_the_hook_once(
    procs: Callable[..., Any], told: list[MeshFailure]
) -> None:
    mesh = procs(3)
    before = time.time()
    picky = mesh.spawn("picky", Picky)
    assert wait_until(lambda: sum(len(failure.ranks) for failure in told) == 3)
    for failure in told:
        assert failure.mesh_name == "picky" and failure.mesh is meshes_of(current_node()).actor_meshes[picky._key]
        assert "FileNotFoundError" in failure.reason and failure.reason.startswith("__init__() raised")
        assert failure.port and before <= failure.when <= time.time()
        assert 'in __init__\n    raise FileNotFoundError(2, "No such file", path)' in failure.text
    assert sorted(rank for failure in told for rank in failure.ranks) == [0, 1, 2]
    # Nothing has become of it meanwhile.
    with pytest.raises(ActorError, match="FileNotFoundError"):
        picky.initialized.get(20)
    told.clear()
    assert nothing_comes(told)


@pytest.mark.parametrize("hears_first", [False, True])
def test_later_constructor_errors_are_reported_too(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any, hears_first: bool
) -> None:
    late = procs(4).spawn("late", Staggered, str(tmp_path / "go"))
    if hears_first:
        with pytest.raises(ActorError, match="ValueError: first"):
            late.initialized.get(30)
    else:
        assert wait_until(lambda: bool(told))
    (tmp_path / "go").touch()
    expected = {} if hears_first else {(0,): "ValueError: first"}
    assert wait_until(lambda: len({rank for each in told for rank in each.ranks}) == 3 + len(expected)), told
    later = [each for each in told if each.ranks != (0,)]
    # Those that come at the same time are one; how many do so depends on the machine.
    assert sorted(rank for each in later for rank in each.ranks) == [1, 2, 3]
    assert all(each.reason == "__init__() raised ValueError: later" for each in later)
    assert hears_first or any(each.reason == "__init__() raised ValueError: first" for each in told)
    assert late._state.creation.port not in current_node().ports.sinks


def read(picky: Any) -> None:
    with pytest.raises(ActorError):
        picky.initialized.get(20)


def read_exception(picky: Any) -> None:
    assert isinstance(picky.initialized.exception(20), ActorError)


def wait_in_loop(picky: Any) -> None:
    async def wait() -> None:
        with pytest.raises(ActorError):
            await picky

    asyncio.run(wait())


def call(picky: Any) -> None:
    with pytest.raises((ActorError, SupervisionError)):
        picky.rank.call().get(20)


def call_one_by_one(picky: Any) -> None:
    for future in picky.rank.stream():
        with pytest.raises((ActorError, SupervisionError)):
            future.get(20)


def stop(picky: Any) -> None:
    picky.stop().get(20)


@pytest.mark.parametrize("hear", [read, read_exception, wait_in_loop, call, call_one_by_one, stop])
def test_read_error_is_not_reported_again(
    procs: Callable[..., Any], told: list[MeshFailure], hear: Callable[[Any], None]
) -> None:
    mesh = procs(2)
    mesh.spawn("warm", Picky, "/").rank.call().get(30)
    with supervise(mesh) as watch:
        hear(mesh.spawn("picky", Picky))
        assert nothing_comes(told) and not watch.failures


def test_held_call_counts_as_read(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    picky = procs(2).spawn("picky", Picky)
    # Under way as the constructors raise, and read when it pleases.
    future = picky.rank.call()
    assert nothing_comes(told)
    with pytest.raises((ActorError, SupervisionError), match="FileNotFoundError"):
        future.get(20)


def test_dropped_call_does_not_count_as_read(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    procs(1).spawn("picky", Picky).rank.call()
    assert wait_until(lambda: bool(told))


@pytest.mark.parametrize("reads", [False, True])
def test_constructor_that_ends_its_process_is_told(
    procs: Callable[..., Any], told: list[MeshFailure], reads: bool
) -> None:
    class Ends(Actor):
        def __init__(self) -> None:
            os._exit(7)

    ends = procs(1).spawn("ends", Ends)
    if reads:
        with pytest.raises(SupervisionError, match="exited with code 7"):
            ends.initialized.get(20)
        assert nothing_comes(told)
    else:
        assert wait_until(lambda: bool(told)) and told[0].reason == "exited with code 7"
        assert told[0].actors == ("ends",) and told[0].running == ()


def test_wait_that_ended_before_does_not_count(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any
) -> None:
    class Late(Actor):
        def __init__(self, path: str) -> None:
            assert wait_until(lambda: os.path.exists(path), 60)
            raise ValueError("late")

    late = procs(1).spawn("late", Late, str(tmp_path / "go"))
    with pytest.raises(TimeoutError):
        late.initialized.get(0.05)

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(late.initialized.as_asyncio(), 0.05)

    asyncio.run(wait())
    (tmp_path / "go").touch()
    assert wait_until(lambda: bool(told)) and "ValueError: late" in told[0].text


def test_one_constructor_that_raises_ends_the_wait_for_others(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any
) -> None:
    waits = procs(4).slice(gpus=slice(1, 4)).spawn("waits", Waits, str(tmp_path / "go"))
    with pytest.raises(ActorError, match="rank 0 is not made") as caught:
        waits.initialized.get(30)
    # By the numbers of the mesh of processes, as output is labelled.
    assert "ranks 2-3 had not answered by then" in str(caught.value) and caught.value.rank == 0
    assert "answered (see err.results)" not in str(caught.value)
    (tmp_path / "go").touch()
    assert values(waits.slice(gpus=slice(1, 3)).rank.call()) == [0, 1] and told == []


class LateAfterDeath(Actor):
    """One constructor ends its process; another one raises, or succeeds, only after that is known."""

    def __init__(self, path: str, raises: bool) -> None:
        rank = current_rank().rank
        if rank == 0 and not os.path.exists(path):
            os._exit(3)
        assert wait_until(lambda: os.path.exists(path), 60)
        if rank == 1 and raises:
            raise ValueError("late")

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


@pytest.mark.parametrize("raises", [True, False])
def test_constructors_that_end_after_a_death_are_heard(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any, raises: bool
) -> None:
    late = procs(3).spawn("late", LateAfterDeath, str(tmp_path / "go"), raises)
    with pytest.raises(SupervisionError, match="rank 0 of late exited with code 3"):
        late.initialized.get(30)
    (tmp_path / "go").touch()
    if raises:
        assert wait_until(lambda: any("ValueError: late" in each.text for each in told))
    else:
        heal_mesh(late)
        assert late.initialized.get(30) and values(late.rank.call()) == [0, 1, 2]


def test_calls_fail_after_unhandled_constructor_error(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any
) -> None:
    waits = procs(2).spawn("waits", Waits, str(tmp_path / "go"))
    # To a rank whose constructor goes on; nobody would end it, as nobody has read that of rank 0.
    with pytest.raises(
        SupervisionError, match=r"rank 0 of waits: __init__\(\) raised ValueError.*supervisor handled it"
    ):
        waits.slice(gpus=1).rank.call_one().get(30)
    (tmp_path / "go").touch()
    # So somebody was told.
    assert nothing_comes(told)


@pytest.mark.parametrize("handles", [True, False])
def test_constructor_error_reaches_supervisors(
    procs: Callable[..., Any], told: list[MeshFailure], handles: bool
) -> None:
    mesh = procs(3)
    with supervise(mesh, lambda failure: handles) as watch:
        mesh.spawn("picky", Picky, "/nowhere", 1)
        assert wait_until(lambda: bool(watch.failures))
        assert [failure.ranks for failure in watch.failures] == [(1,)]
        assert watch.failures[0].reason.startswith("__init__() raised FileNotFoundError")
        assert nothing_comes(told) if handles else wait_until(lambda: len(told) == 1)


def test_healing_supervisor_recreates_the_actor(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh, path = procs(2), tmp_path / "weights"

    def mend(failure: MeshFailure) -> Any:
        path.touch()
        return heal_mesh(failure.mesh)

    with supervise(mesh, mend) as watch:
        picky = mesh.spawn("picky", Picky, str(path))
        assert wait_until(lambda: bool(watch.failures))
    assert values(picky.rank.call()) == [0, 1]
    picky.initialized.get(0)


@pytest.mark.parametrize("during", [True, False], ids=["during", "after"])
def test_healer_also_gets_errors_of_later_constructors(
    procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any, during: bool
) -> None:
    """Constructors that raise while the actor of another rank is recreated, or after that."""
    mesh, spawned = procs(2), list[Any]()

    def raised() -> bool:
        return 1 in spawned[0]._state.creation.raised

    def mend(failure: MeshFailure) -> Any:
        (tmp_path / f"mended {failure.ranks[0]}").touch()
        assert wait_until(lambda: bool(spawned))
        if during:
            (tmp_path / "go 1").touch()
            assert wait_until(raised)
        healed = heal_mesh(failure.mesh)
        (tmp_path / "go 1").touch()
        return healed

    with supervise(mesh, mend) as watch:
        spawned.append(mesh.spawn("actors", InTurn, str(tmp_path)))
        (tmp_path / "go 0").touch()
        assert wait_until(lambda: len(watch.failures) == 2)
    assert values(spawned[0].rank.call()) == [0, 1] and told == []
    assert spawned[0].initialized.get(0) in (None, True)


def test_late_actors_complete_a_healed_mesh(procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any) -> None:
    mesh, path = procs(2), tmp_path / "go 1"

    def mend(failure: MeshFailure) -> Any:
        (tmp_path / "mended 0").touch()
        return heal_mesh(failure.mesh)

    with supervise(mesh, mend) as watch:
        actors = mesh.spawn("actors", LateOrNot, str(tmp_path))
        assert wait_until(lambda: bool(watch.failures))
    path.touch()
    assert values(actors.rank.call()) == [0, 1] and told == []
    assert wait_until(lambda: actors._state.creation is None)
    assert actors.initialized.get(0)


def test_restart_rule_makes_the_actor_again(procs: Callable[..., Any], told: list[MeshFailure], tmp_path: Any) -> None:
    mesh = procs(2, restart=Restart(most=4, within=600.0, backoff=0.05))
    once = mesh.spawn("once", FailsOnce, str(tmp_path))
    # A call sent before would get the error of a constructor, and the actor would not be made again.
    assert wait_until(lambda: all((tmp_path / f"{rank}.made").exists() for rank in range(2)))
    assert wait_until(lambda: mesh._state.restarts > 0)
    assert values(once.rank.call()) == [0, 1] and told == []


@pytest.mark.parametrize("handles", [True, False])
def test_constructor_error_reaches_the_owner(procs: Callable[..., Any], told: list[MeshFailure], handles: bool) -> None:
    owner = procs(1).spawn("owner", Owner, handles)
    owner.begin.call_one().get(30)
    if handles:
        assert wait_until(lambda: sum(len(ranks) for _, ranks, _ in owner.what.call_one().get(30)) == 2)
        for name, _, reason in owner.what.call_one().get(30):
            assert name == "picky" and reason.startswith("__init__() raised FileNotFoundError")
        assert nothing_comes(told)
    else:
        # It has failed with what it owns.
        assert wait_until(lambda: bool(told)) and told[0].mesh_name == "owner" and "picky" in told[0].text


def test_unrelated_heal_does_not_rerun_failed_constructor(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    mesh = procs(2)
    good = mesh.spawn("good", Picky, "/")
    mesh.spawn("picky", Picky, "/nowhere", 0)
    assert wait_until(lambda: bool(told))
    os.kill(values(good.pid.call())[1], signal.SIGKILL)
    with pytest.raises(DeviceMeshError):
        while True:
            good.rank.call().get(30)
    heal_mesh(mesh)
    assert values(good.rank.call()) == [0, 1]


SILENT = """
import sys, time
import monarch.actor
from monarch.actor import Actor, this_host

class E(Actor):
    def __init__(self):
        raise Exception("bad")

if __name__ == "__main__":
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    procs.initialized.get()
    if "hook" in sys.argv:
        monarch.actor.unhandled_fault_hook = lambda failure: print("told:", failure.reason, flush=True)
    procs.spawn("e", E)
    # In the one case nobody lives to see it, if the end of the program does not tell of it.
    time.sleep(0.08 if "soon" in sys.argv else 1.5)
"""


@pytest.mark.parametrize("args", [(), ("hook",), ("soon",)])
def test_program_prints_unread_constructor_error(program: Callable[..., Any], args: tuple[str, ...]) -> None:
    ran = program(SILENT, *args)
    out = ran.ok()
    if "hook" in args:
        assert out == "told: __init__() raised Exception: bad\n"
    else:
        assert "unhandled failure of rank 0 of e: __init__() raised Exception: bad" in ran.err
        assert 'raise Exception("bad")' in ran.err and ran.err.count("unhandled failure") == 1


# While a rank is replaced


class Slow(Actor):
    """Its second construction lasts until a file exists."""

    def __init__(self, marks: str) -> None:
        rank = current_rank().rank
        if os.path.exists(f"{marks}/{rank}"):
            open(f"{marks}/again", "w").close()
            assert wait_until(lambda: os.path.exists(f"{marks}/go"), 60)
        open(f"{marks}/{rank}", "w").close()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("in_loop", [False, True])
def test_spawn_does_not_wait_for_a_heal(
    procs: Callable[..., Any], tmp_path: Any, told: list[MeshFailure], in_loop: bool
) -> None:
    mesh = procs(2, name="mesh")
    slow = mesh.spawn("slow", Slow, str(tmp_path))
    pids = values(slow.pid.call())
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: known_dead(mesh, 1))
    healing = threading.Thread(target=heal_mesh, args=(mesh,))
    healing.start()
    # In the middle of the heal, which ends only when the file is there.
    assert wait_until(lambda: (tmp_path / "again").exists())

    async def spawn() -> Any:
        return mesh.spawn("late", Picky, "/")

    late = asyncio.run(spawn()) if in_loop else mesh.spawn("late", Picky, "/")
    assert healing.is_alive() and mesh._state.changes.now.what == "healed"
    late.initialized.get(30)
    assert values(late.rank.call()) == [0, 1] and healing.is_alive()
    (tmp_path / "go").touch()
    healing.join(30)
    assert not healing.is_alive() and mesh._state.changes.now is None
    assert values(slow.pid.call())[0] == pids[0] and told == []


@pytest.mark.parametrize("heals", [True, False])
def test_spawn_before_the_rank_is_replaced(
    procs: Callable[..., Any], tmp_path: Any, told: list[MeshFailure], heals: bool
) -> None:
    mesh = procs(2, name="mesh")
    first, gate, judged = mesh.spawn("first", Picky, "/"), threading.Event(), threading.Event()
    pids = values(first.pid.call())

    def on_failure(failure: MeshFailure) -> Any:
        judged.set()
        assert gate.wait(30)
        return heal_mesh(failure.mesh) if heals else True

    with supervise(mesh, on_failure):
        os.kill(pids[1], signal.SIGKILL)
        assert judged.wait(20)
        late = mesh.spawn("late", Picky, "/")
        # It is made where it can be, and awaits the other one.
        assert values(late.slice(gpus=slice(0, 1)).rank.call()) == [0] and not late.initialized.done
        gate.set()
        if heals:
            late.initialized.get(30)
            assert values(late.rank.call()) == [0, 1]
        else:
            with pytest.raises(SupervisionError, match="was killed by signal 9"):
                late.initialized.get(30)
            with pytest.raises(SupervisionError):
                late.rank.call().get(30)
    assert told == []


def test_spawn_on_a_dead_rank_raises_without_a_heal(procs: Callable[..., Any], told: list[MeshFailure]) -> None:
    mesh = procs(2)
    os.kill(values(mesh.spawn("first", Picky, "/").pid.call())[1], signal.SIGKILL)
    assert wait_until(lambda: bool(told))
    with pytest.raises(SupervisionError, match=r"spawn\('late'\) failed.*signal 9"):
        mesh.spawn("late", Picky, "/")


def test_change_waits_for_another_and_names_it(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(2, name="mesh")
    slow = mesh.spawn("slow", Slow, str(tmp_path))
    os.kill(values(slow.pid.call())[1], signal.SIGKILL)
    assert wait_until(lambda: known_dead(mesh, 1))
    healing = threading.Thread(target=heal_mesh, args=(mesh,))
    healing.start()
    assert wait_until(lambda: (tmp_path / "again").exists())
    with pytest.raises(SupervisionError, match=r"mesh was not healed: it is still being healed \(.* s so far\)"):
        heal_mesh(mesh, timeout=0.2)
    (tmp_path / "go").touch()
    mesh.resize(gpus=3)
    healing.join(30)
    assert len(values(slow.pid.call())) == 3
