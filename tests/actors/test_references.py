"""Meshes as arguments, and meshes that actors spawn: a reference can be used and owns nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest

from leaks import processes, wait_until
from monarch.actor import Actor, ProcMesh, context, current_rank, endpoint, this_host, this_proc
from monarch.exceptions import DeviceMeshError, StoppedError


class Leaf(Actor):
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.seen: list[Any] = []

    @endpoint
    def add(self, x: int) -> int:
        return self.base + x + current_rank().rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def note(self, x: Any) -> int:
        self.seen.append(x)
        return len(self.seen)


class Boss(Actor):
    """Uses its arguments, and spawns meshes."""

    def __init__(self, friend: Any = None) -> None:
        self.friend = friend
        self.kept: list[Any] = []

    @endpoint
    def ask(self, mesh: Any, x: int) -> list[int]:
        return list(mesh.add.call(x).get().values())

    @endpoint
    async def ask_async(self, mesh: Any, x: int) -> list[int]:
        return list((await mesh.add.call(x)).values())

    @endpoint
    def ask_friend(self, x: int) -> list[int]:
        return list(self.friend.add.call(x).get().values())

    @endpoint
    def give_back(self, mesh: Any) -> Any:
        return mesh.slice(gpus=1)

    @endpoint
    def spawn_on(self, procs: Any, base: int) -> Any:
        made = procs.spawn("made by boss", Leaf, base)
        self.kept.append(made)
        return made

    @endpoint
    def spawn_here(self) -> Any:
        return this_proc().spawn("neighbour", Leaf, 50)

    @endpoint
    def own_pid(self) -> int:
        return os.getpid()

    @endpoint
    async def spawn_procs(self, host: Any, count: int) -> Any:
        procs = (host or this_host()).spawn_procs(per_host={"gpus": count}, name="inner")
        self.kept.append(procs)
        leaves = procs.spawn("leaves", Leaf, 7)
        await leaves.initialized
        return procs, leaves

    @endpoint
    async def stop_procs(self) -> None:
        await self.kept.pop().stop()

    @endpoint
    async def try_stop(self, mesh: Any) -> str:
        try:
            await mesh.stop()
        except StoppedError as error:
            return str(error)
        return "stopped"


class SyncBoss(Actor):
    @endpoint
    def spawn_procs(self, count: int) -> Any:
        procs = this_host().spawn_procs(per_host={"gpus": count})
        self.leaves = procs.spawn("leaves", Leaf, 3)
        return procs, self.leaves, list(self.leaves.add.call(1).get().values())


def test_an_actor_mesh_as_argument_and_as_result(procs: Any) -> None:
    leaves = procs(2).spawn("leaf", Leaf, 10)
    boss = procs(1).spawn("boss", Boss, leaves)
    assert boss.ask.call_one(leaves, 1).get(timeout=20) == [11, 12]
    assert boss.ask_async.call_one(leaves.slice(gpus=slice(1, 2)), 1).get(timeout=20) == [11]
    assert boss.ask_friend.call_one(5).get(timeout=20) == [15, 16]
    back = boss.give_back.call_one(leaves).get(timeout=20)
    assert back == leaves.slice(gpus=1)
    assert back.add.call_one(0).get(timeout=20) == 10


def test_procs_travel_as_argument(procs: Any) -> None:
    mesh = procs(2)
    boss = procs(1).spawn("boss", Boss)
    made = boss.spawn_on.call_one(mesh, 30).get(timeout=20)
    assert list(made.add.call(0).get(timeout=20).values()) == [30, 31]
    ours = mesh.spawn("ours", Leaf)
    assert list(made.pid.call().get(timeout=20).values()) == list(ours.pid.call().get(timeout=20).values())
    with pytest.raises(StoppedError, match="by its owner"):
        made.stop()
    assert boss.try_stop.call_one(ours).get(timeout=20).endswith("by its owner")
    assert "by its owner" in boss.try_stop.call_one(mesh).get(timeout=20)
    assert list(ours.add.call(0).get(timeout=20).values()) == [0, 1]


def test_a_view_cannot_stop_the_whole(procs: Any) -> None:
    mesh = procs(2)
    leaves = mesh.spawn("leaf", Leaf)
    for part in (mesh.slice(gpus=0), leaves.slice(gpus=0)):
        with pytest.raises(StoppedError, match="as a whole"):
            part.stop()
    with pytest.raises(RuntimeError, match="view or a reference"):
        this_host().shutdown()
    assert list(leaves.add.call(0).get(timeout=20).values()) == [0, 1]


def test_an_actor_spawns_a_neighbour_in_its_proc(procs: Any) -> None:
    boss = procs(1).spawn("boss", Boss)
    neighbour = boss.spawn_here.call_one().get(timeout=20)
    assert neighbour.add.call_one(1).get(timeout=20) == 51
    assert neighbour.pid.call_one().get(timeout=20) == boss.own_pid.call_one().get(timeout=20)


@pytest.mark.parametrize("given", [True, False])
def test_procs_of_an_actor_end_with_it(procs: Any, given: bool) -> None:
    boss = procs(1).spawn("boss", Boss)
    boss.own_pid.call_one().get(timeout=20)
    before = set(processes())
    inner, leaves = boss.spawn_procs.call_one(this_host() if given else None, 2).get(timeout=20)
    assert isinstance(inner, ProcMesh) and inner.sizes == {"gpus": 2}
    assert list(leaves.add.call(1).get(timeout=20).values()) == [8, 9]
    pids = set(leaves.pid.call().get(timeout=20).values())
    assert pids == set(processes()) - before
    boss.stop().get(timeout=20)
    assert wait_until(lambda: not pids & set(processes()))
    with pytest.raises(DeviceMeshError):
        leaves.add.call(1).get(timeout=20)


def test_an_actor_stops_what_it_spawned(procs: Any) -> None:
    boss = procs(1).spawn("boss", Boss)
    _, leaves = boss.spawn_procs.call_one(None, 2).get(timeout=20)
    pids = set(leaves.pid.call().get(timeout=20).values())
    boss.stop_procs.call_one().get(timeout=20)
    assert wait_until(lambda: not pids & set(processes()))
    with pytest.raises(StoppedError):
        leaves.add.call(1).get(timeout=20)


def test_a_sync_actor_spawns_procs_and_calls_them(procs: Any) -> None:
    boss = procs(1).spawn("boss", SyncBoss)
    _, leaves, said = boss.spawn_procs.call_one(2).get(timeout=20)
    assert said == [4, 5]
    pids = set(leaves.pid.call().get(timeout=20).values())
    boss.stop().get(timeout=20)
    assert wait_until(lambda: not pids & set(processes()))


def test_every_rank_spawns_its_own(procs: Any) -> None:
    bosses = procs(3).spawn("boss", Boss)
    made = list(bosses.spawn_procs.call(None, 1).get(timeout=30).values())
    pids = {leaves.pid.call_one().get(timeout=20) for _, leaves in made}
    assert len(pids) == 3
    bosses.stop().get(timeout=20)
    assert wait_until(lambda: not pids & set(processes()))


def test_actor_can_get_itself_as_argument(procs: Any) -> None:
    class Me(Actor):
        @endpoint
        async def hold(self, me: Any) -> bool:
            self.me = me
            return (await me.which.call_one()) == context().actor_instance.actor_id

        @endpoint(concurrent=True)
        async def which(self) -> str:
            return context().actor_instance.actor_id

    me = procs(1).spawn("me", Me)
    assert me.hold.call_one(me).get(timeout=20)


def test_a_host_mesh_travels(procs: Any) -> None:
    class Echo(Actor):
        @endpoint
        def echo(self, x: Any) -> Any:
            return x

        @endpoint
        def host(self) -> Any:
            return this_host(), this_proc().host_mesh

    echo = procs(1).spawn("echo", Echo)
    assert echo.echo.call_one(this_host()).get(timeout=20) == this_host()
    assert echo.host.call_one().get(timeout=20) == (this_host(), this_host())


def test_reference_may_arrive_before_its_actor(procs: Any) -> None:
    boss = procs(2).spawn("boss", Boss)
    boss.own_pid.call().get(timeout=20)
    for round_ in range(10):
        with this_host().spawn_procs() as mesh:
            # To the leaf it is another sender that calls, so its message may come before that of the spawn.
            leaf = mesh.spawn("leaf", Leaf, round_)
            assert list(boss.ask.call(leaf, 1).get(timeout=20).values()) == [[round_ + 1]] * 2
